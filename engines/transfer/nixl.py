"""Tensors between processes and machines by NIXL, an implementation of `TensorTransfer`.

The thread that calls NIXL polls often while a read is in progress or a reader was admitted, and ten times a second otherwise, so that idle agents
cost almost nothing. NIXL's calls release the GIL while they copy.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

import structlog

from headwater.engines.transfer.memory import Memory
from headwater.engines.transfer.nixl_agent import NixlAgent, digest_of
from headwater.engines.transfer.port import (
    PeerGone,
    ReadTimedOut,
    TransferClosed,
    TransferError,
    TransferFailed,
)
from headwater.engines.transfer.slab import SlabTransfer, run_copy
from headwater.schemas.clock import Clock
from headwater.schemas.messages.transfer import NixlPlace, Offer, Place

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
        for one in ended:
            self._give_up(one, agent)
            self._post(one.future, error)
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


class NixlTransfer(SlabTransfer):
    """A slab that other processes read by NIXL. Arguments as `SlabTransfer`; call `start` first."""

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

    async def _copy(self, nbytes: int, work: Callable[[], T]) -> T:
        return await run_copy(nbytes, work)

    async def _end(self) -> None:
        await self._nixl.close()
