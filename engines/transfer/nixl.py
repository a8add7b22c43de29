"""Tensors between processes and machines by NIXL, an implementation of `TensorTransfer`: the only importer of `nixl`.

Written for NIXL 1.5.1 with its UCX backend. `NixlAgent` is its API as used here, with its errors converted. Nothing received from a peer is
unpickled (unlike NIXL's own descriptors): addresses are sent as numbers, and NIXL rejects those outside the peer's registered memory.

The thread that calls NIXL polls often while a read is in progress or a reader was admitted, and ten times a second otherwise, so that idle
agents cost almost nothing. NIXL's calls release the GIL while they copy.
"""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from typing import Any, Final, TypeVar

import structlog

from headwater.engines.transfer.port import (
    Memory,
    PeerGone,
    ReadTimedOut,
    TransferClosed,
    TransferError,
    TransferFailed,
    TransferUnavailable,
)
from headwater.engines.transfer.slab import TensorTransfer
from headwater.schemas.clock import Clock
from headwater.schemas.media import DIGEST_BYTES, NixlPlace, Offer, Place


def digest_of(metadata: bytes) -> bytes:
    """The digest by which a `NixlPlace` identifies an agent's metadata."""
    return blake2b(metadata, digest_size=DIGEST_BYTES).digest()


class NixlAgent:
    """An agent with one registered slab. NIXL's agents are not thread-safe: create, use and end it on one thread.

    NIXL destroys an agent when the last reference to it goes, and a traceback or a handle is one: nothing of NIXL's leaves this
    class but handles, which `end` must outlive. `name` must be unique for all time. Raises `TransferUnavailable` where NIXL
    cannot start.
    """

    def __init__(self, name: str, memory: Memory) -> None:
        try:
            from nixl._api import nixl_agent, nixl_agent_config
            from nixl._bindings import nixlBackendError, nixlRemoteDisconnectError
        except ImportError as error:
            raise TransferUnavailable(
                f"NIXL is not installed ({error}): pip install headwater[nixl]"
            ) from error
        self.name = name
        self._memory = memory
        self._disconnected: type[Exception] = nixlRemoteDisconnectError
        self._backend_error: type[Exception] = nixlBackendError
        self._peers: set[str] = set()
        self._stuck: list[Any] = []
        try:
            # Its progress thread uses a whole core even when idle; `progress` is called instead.
            config = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            self._agent: Any = nixl_agent(name, config)
            region = [(memory.address, memory.nbytes, memory.device, "")]
            self._registered: Any = self._agent.register_memory(region, memory.kind)
            self.metadata: bytes = self._agent.get_agent_metadata()
        except Exception as error:
            raise TransferUnavailable(
                f"NIXL cannot register {memory.nbytes} B of {memory.kind}: {error!r}"
            ) from _without_frames(error)

    def meet(self, place: NixlPlace, metadata: bytes) -> None:
        """Register a peer's slab, and start to connect. Idempotent. Raises `PeerGone`, `TransferFailed`."""
        if place.agent in self._peers:
            return
        if digest_of(metadata) != place.metadata:
            raise TransferFailed(f"the metadata received for {place.agent} does not match its offer")
        try:
            name = self._agent.add_remote_agent(metadata).decode()  # bytes, whatever its annotation says
        except self._backend_error as error:
            raise PeerGone(f"{place.agent} is unreachable: {error}") from _without_frames(error)
        except Exception as error:
            raise TransferFailed(
                f"NIXL rejects the metadata of {place.agent}: {error!r}"
            ) from _without_frames(error)
        self._peers.add(name)
        if name != place.agent:
            self.forget(name)
            raise TransferFailed(f"the metadata of {place.agent} is that of {name}")

    def forget(self, peer: str) -> None:
        """Remove a peer that has ended. Unknown ones are ignored."""
        if peer in self._peers:
            self._peers.remove(peer)
            with contextlib.suppress(Exception):  # NIXL may have removed it already
                self._agent.remove_remote_agent(peer)

    def start_read(self, place: NixlPlace, offset: int, nbytes: int) -> Any:
        """Start to read into `offset` of the slab; returns a handle. Raises `PeerGone`, `TransferFailed`.

        Between processes of one host this does the whole read: it returns when the bytes have been copied.
        """
        local_regions = [(self._memory.address + offset, nbytes, self._memory.device)]
        remote_regions = [(place.address, nbytes, place.device)]
        handle = None
        with self._errors(place.agent):
            into = self._agent.get_xfer_descs(local_regions, self._memory.kind)
            source = self._agent.get_xfer_descs(remote_regions, place.memory)
            handle = self._agent.initialize_xfer("READ", into, source, place.agent)
            try:
                self._agent.transfer(handle)
            except BaseException:
                self.end_reading(handle)
                raise
        return handle

    def is_done(self, handle: Any, peer: str) -> bool:
        """Poll a read, which also advances it. Raises `PeerGone`, `TransferFailed`."""
        with self._errors(peer):
            state = self._agent.check_xfer_state(handle)
        if state == "ERR":
            raise TransferFailed(f"NIXL could not read from {peer}")
        return bool(state == "DONE")

    def end_reading(self, handle: Any) -> None:
        """Free a handle. An unfinished read may still write its bytes afterwards."""
        try:
            handle.release()
        except Exception:
            self._stuck.append(handle)  # it cannot be cancelled now; tried again at the end

    def progress(self) -> None:
        """Serve peers that connect or read with the help of this agent. About 2 µs when idle."""
        with contextlib.suppress(Exception):  # a peer's errors are raised by its reads
            self._agent.get_new_notifs()

    def end(self) -> None:
        """Deregister the slab and end the agent."""
        while self._stuck:
            with contextlib.suppress(Exception):  # NIXL's own finalizer tries once more
                self._stuck.pop().release()
        for peer in list(self._peers):
            self.forget(peer)
        with contextlib.suppress(Exception):  # memory that cannot be deregistered is left
            self._agent.deregister_memory(self._registered)
        self._agent = None

    @contextlib.contextmanager
    def _errors(self, peer: str) -> Any:
        try:
            yield
        except self._disconnected as error:
            raise PeerGone(f"the process of {peer} has ended") from _without_frames(error)
        except Exception as error:
            raise TransferFailed(f"NIXL could not read from {peer}: {error!r}") from _without_frames(error)


def _without_frames(error: Exception) -> Exception:
    """The error without its tracebacks, whose frames hold NIXL's objects."""
    cause: BaseException | None = error
    while cause is not None:
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__
    return error


T = TypeVar("T")
Job = Callable[[NixlAgent], None]

SHORTEST_S: Final = 0.00005
LONGEST_S: Final = 0.002
SHARE: Final = 8
"""A read is polled again after an eighth of its duration so far, within these bounds."""

EXPECTING_S: Final = 0.001
"""Pause while a reader may be connecting: its first read takes 27 ms, and 58 ms with a pause ten times as long."""

IDLE_S: Final = 0.1

GRACE_S: Final = 2.0
"""How long a call into NIXL may exceed its timeout before the loop continues without it."""

_log = structlog.get_logger("headwater.transfer")


class _Reading:
    """One read. Created on the loop, used by the thread; `future` belongs to the loop."""

    def __init__(self, place: NixlPlace, within_s: float, future: "asyncio.Future[None]") -> None:
        self.place = place
        self.future = future
        self.handle: Any = None
        # Real time, whatever clock the leases use: it waits for hardware.
        self.began_s = time.monotonic()
        self.until_s = self.began_s + within_s

    @property
    def pause_s(self) -> float:
        """Seconds until the next poll."""
        return min(max((time.monotonic() - self.began_s) / SHARE, SHORTEST_S), LONGEST_S)


class NixlThread:
    """An agent with a unique name, on a thread of its own. Methods are called from the loop that called `start`."""

    def __init__(self, name: str, memory: Memory) -> None:
        self.name = name
        self.metadata = b""
        self.digest = b""
        # NIXL needs no metadata for its own slab.
        self.met = {name}
        self._memory = memory
        self._loop: asyncio.AbstractEventLoop
        self._pending: set[asyncio.Future[Any]] = set()
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._closed = False
        self._expecting_until_s = 0.0
        self._readings: list[_Reading] = []
        self._thread: threading.Thread | None = None

    async def start(self) -> None:
        """Start the thread and register the slab. Raises `TransferUnavailable`."""
        self._loop = asyncio.get_running_loop()
        started: asyncio.Future[bytes] = self._future()
        self._thread = threading.Thread(
            target=self._run, args=(started,), name=f"nixl {self.name}", daemon=True
        )
        self._thread.start()
        try:
            self.metadata = await started
        finally:
            # A future in a frame of its own exception's traceback: a cycle, which would keep the callers' frames.
            del started
        self.digest = digest_of(self.metadata)

    async def meet(self, place: NixlPlace, metadata: bytes) -> None:
        """See `NixlAgent.meet`."""
        done: asyncio.Future[None] = self._future()

        self._jobs.put(partial(self._meet, place, metadata, done))
        try:
            await done
        finally:
            del done  # as in `start`
        self.met.add(place.agent)

    async def read(self, place: NixlPlace, offset: int, nbytes: int, within_s: float) -> None:
        """Read into `offset` of the slab. Raises `PeerGone`, `ReadTimedOut`, `TransferFailed`, `TransferClosed`.

        Unless this returns normally, also after cancellation, the bytes may still be written later.
        """
        reading = _Reading(place, within_s, self._future())
        self._jobs.put(partial(self._begin, reading, offset, nbytes))
        try:
            async with asyncio.timeout(within_s + GRACE_S):
                await reading.future
        except TimeoutError as error:
            raise ReadTimedOut(f"NIXL did not return from reading {nbytes} B of {place.agent}") from error
        except PeerGone:
            self.met.discard(place.agent)
            raise
        finally:
            if reading.future.cancelled():
                self._jobs.put(partial(self._give_up, reading))
            del reading  # as in `start`

    def expect(self, within_s: float) -> None:
        """A reader was admitted for this long; zero: none is left."""
        self._expecting_until_s = time.monotonic() + within_s
        self._jobs.put(_nothing)

    async def close(self) -> None:
        """End the thread. Unfinished reads raise `TransferClosed`. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._jobs.put(None)
        if self._thread is None:
            return
        await asyncio.to_thread(self._thread.join, GRACE_S)
        if self._thread.is_alive():
            _log.warning("nixl_stop_timed_out", agent=self.name)
        for future in list(self._pending):
            _settle(future, TransferClosed(f"the transfer {self.name} is closed"))

    def _future(self) -> "asyncio.Future[Any]":
        if self._closed:
            raise TransferClosed(f"the transfer {self.name} is closed")
        future: asyncio.Future[Any] = self._loop.create_future()
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        return future

    # The methods below run on the thread.

    def _post(self, future: "asyncio.Future[Any]", result: Any) -> None:
        if isinstance(result, Exception):
            result.__traceback__ = None  # its frames hold NIXL's objects, which only this thread may free
        try:
            self._loop.call_soon_threadsafe(_settle, future, result)
        except RuntimeError:
            pass  # the loop has ended, and with it all waiting callers

    def _run(self, started: "asyncio.Future[bytes]") -> None:
        try:
            agent = NixlAgent(self.name, self._memory)
        except TransferError as error:
            self._post(started, error)
            return
        self._post(started, agent.metadata)
        while True:
            try:
                job = self._jobs.get(timeout=self._pause_s())
            except queue.Empty:
                job = _nothing
            if job is None:
                break
            job(agent)
            self._look(agent)
        while self._readings:
            self._give_up(self._readings[0], agent)
        agent.end()

    def _pause_s(self) -> float:
        if self._readings:
            return min(reading.pause_s for reading in self._readings)
        return EXPECTING_S if time.monotonic() < self._expecting_until_s else IDLE_S

    def _meet(
        self, place: NixlPlace, metadata: bytes, done: "asyncio.Future[None]", agent: NixlAgent
    ) -> None:
        try:
            agent.meet(place, metadata)
        except Exception as error:
            self._post(done, error)
        else:
            self._post(done, None)

    def _begin(self, reading: _Reading, offset: int, nbytes: int, agent: NixlAgent) -> None:
        if reading.future.done():
            return
        try:
            reading.handle = agent.start_read(reading.place, offset, nbytes)
        except TransferError as error:
            self._failed(agent, reading, error)
        else:
            self._readings.append(reading)

    def _give_up(self, reading: _Reading, agent: NixlAgent) -> None:
        if reading in self._readings:
            self._readings.remove(reading)
            # The caller keeps the reading, perhaps in a traceback, and a handle keeps NIXL's agent.
            handle, reading.handle = reading.handle, None
            agent.end_reading(handle)

    def _look(self, agent: NixlAgent) -> None:
        if not self._readings:
            agent.progress()
        for reading in list(self._readings):
            if reading not in self._readings:
                continue  # its peer was found dead in this round
            try:
                done = agent.is_done(reading.handle, reading.place.agent)
            except TransferError as error:
                self._failed(agent, reading, error)
                continue
            if done:
                self._give_up(reading, agent)
                self._post(reading.future, None)
            elif time.monotonic() > reading.until_s:
                took_s = time.monotonic() - reading.began_s
                late = ReadTimedOut(f"{reading.place.agent} did not deliver within {took_s:.3g} s")
                self._failed(agent, reading, late)

    def _failed(self, agent: NixlAgent, reading: _Reading, error: TransferError) -> None:
        peer = reading.place.agent
        ended = [reading]
        if isinstance(error, PeerGone):
            # NIXL reports each of them separately and later; fail them all now.
            ended += [other for other in self._readings if other.place.agent == peer and other is not reading]
        for failed in ended:
            self._give_up(failed, agent)
            self._post(failed.future, error)
        if isinstance(error, PeerGone):
            agent.forget(peer)


def _nothing(_agent: NixlAgent) -> None:
    """Wake the thread."""


def _settle(future: "asyncio.Future[Any]", result: Any) -> None:
    if future.done():
        return  # cancelled, or closed
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)


# The transfer.


class NixlTransfer(TensorTransfer):
    """A slab that other processes read by NIXL. Call `start` first."""

    def __init__(
        self,
        owner: str,
        epoch: int,
        memory: Memory,
        clock: Clock,
        new_lease: Callable[[], bytes],
        **options: Any,
    ) -> None:
        super().__init__(owner, epoch, memory, clock, new_lease, **options)
        # Random, so that no two incarnations of a worker share an agent even if they had the same epoch.
        self._nixl = NixlThread(f"{owner}.{epoch}.{new_lease().hex()[:12]}", memory)

    async def start(self) -> "NixlTransfer":
        """Register the slab. Raises `TransferUnavailable`."""
        await self._nixl.start()
        self._metadata = self._nixl.metadata
        return self

    def _expect_reader(self, within_s: float) -> None:
        self._nixl.expect(within_s)

    def _place(self, offset: int) -> NixlPlace:
        memory = self._memory
        return NixlPlace(
            self._nixl.name, self._nixl.digest, memory.kind, memory.device, memory.address + offset
        )

    def _knows(self, place: Place) -> bool:
        if not isinstance(place, NixlPlace):
            raise TransferFailed("the offer is not a NIXL offer")
        return place.agent in self._nixl.met

    async def _meet(self, place: Place, metadata: bytes) -> None:
        assert isinstance(place, NixlPlace)
        await self._nixl.meet(place, metadata)

    async def _fetch(self, offer: Offer, offset: int, within_s: float) -> None:
        assert isinstance(offer.place, NixlPlace)
        await self._nixl.read(offer.place, offset, offer.nbytes, within_s)

    async def _end(self) -> None:
        await self._nixl.close()
