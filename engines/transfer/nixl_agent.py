"""The NIXL API as used by transfers, with its errors converted: the only importer of `nixl`.

Written for NIXL 1.5.1 with its UCX backend. Nothing received from a peer is unpickled (unlike NIXL's own descriptors):
addresses are sent as numbers, and NIXL rejects those outside the peer's registered memory.
"""

import contextlib
from hashlib import blake2b
from typing import Any

from headwater.engines.transfer.memory import Memory
from headwater.engines.transfer.port import PeerGone, TransferFailed, TransferUnavailable
from headwater.schemas.messages.transfer import DIGEST_BYTES, NixlPlace


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
        ours = [(self._memory.address + offset, nbytes, self._memory.device)]
        theirs = [(place.address, nbytes, place.device)]
        handle = None
        with self._errors(place.agent):
            into = self._agent.get_xfer_descs(ours, self._memory.kind)
            source = self._agent.get_xfer_descs(theirs, place.memory)
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
