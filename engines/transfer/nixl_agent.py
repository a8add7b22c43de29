"""NIXL as the transfers use it, with its errors as ours: the only importer of `nixl`.

Written for NIXL 1.5.1 with its UCX backend. Nothing that a peer sent is unpickled (as NIXL's own descriptors are):
addresses travel as numbers, and NIXL itself refuses those outside what the peer registered.
"""

import contextlib
from hashlib import blake2b
from typing import Any

from headwater.engines.transfer.memory import Memory
from headwater.engines.transfer.port import PeerGone, TransferFailed, TransferUnavailable
from headwater.schemas.transfer import DIGEST_BYTES, NixlPlace


def digest_of(metadata: bytes) -> bytes:
    """What a `NixlPlace` names an agent's metadata by."""
    return blake2b(metadata, digest_size=DIGEST_BYTES).digest()


class NixlAgent:
    """An agent with one registered slab. NIXL's agents are not made for several threads: make and use it on one.

    `name` must never be used for another agent. Raises `TransferUnavailable` where NIXL can not start.
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
            # Its progress thread keeps a whole core busy even when nothing moves; `progress` is called instead.
            config = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            self._agent: Any = nixl_agent(name, config)
            region = [(memory.address, memory.nbytes, memory.device, "")]
            self._registered: Any = self._agent.register_memory(region, memory.kind)
            self.metadata: bytes = self._agent.get_agent_metadata()
        except Exception as error:
            raise TransferUnavailable(
                f"NIXL can not register {memory.nbytes} B of {memory.kind}: {error!r}"
            ) from error

    def meet(self, place: NixlPlace, metadata: bytes) -> None:
        """Make a peer's slab known, and begin to connect. Again is fine. Raises `PeerGone`, `TransferFailed`."""
        if place.agent in self._peers:
            return
        if digest_of(metadata) != place.metadata:
            raise TransferFailed(f"the metadata that came for {place.agent} is not what its offer names")
        try:
            name = self._agent.add_remote_agent(metadata).decode()  # bytes, whatever its annotation says
        except self._backend_error as error:
            raise PeerGone(f"{place.agent} can not be reached: {error}") from error
        except Exception as error:
            raise TransferFailed(f"NIXL does not take the metadata of {place.agent}: {error!r}") from error
        self._peers.add(name)
        if name != place.agent:
            self.forget(name)
            raise TransferFailed(f"the metadata of {place.agent} is that of {name}")

    def forget(self, peer: str) -> None:
        """Drop a peer that is gone. Unknown ones are ignored."""
        if peer in self._peers:
            self._peers.remove(peer)
            with contextlib.suppress(Exception):  # NIXL may have dropped it before us
                self._agent.remove_remote_agent(peer)

    def begin(self, place: NixlPlace, offset: int, nbytes: int) -> Any:
        """Begin to read into `offset` of the slab; returns a handle. Raises `PeerGone`, `TransferFailed`.

        Between processes of one host this is all of the work: it returns when the bytes are there.
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
        """Look at a reading, which also makes it go on. Raises `PeerGone`, `TransferFailed`."""
        with self._errors(peer):
            state = self._agent.check_xfer_state(handle)
        if state == "ERR":
            raise TransferFailed(f"NIXL could not read from {peer}")
        return bool(state == "DONE")

    def end_reading(self, handle: Any) -> None:
        """Free a handle. A reading that is not done may still land afterwards: NIXL promises nothing else."""
        try:
            handle.release()
        except Exception:
            self._stuck.append(handle)  # it can not be cancelled now; again at the end

    def progress(self) -> None:
        """Answer whoever connects or reads through our help. About 2 µs when there is nothing."""
        with contextlib.suppress(Exception):  # a peer's errors come with its readings
            self._agent.get_new_notifs()

    def end(self) -> None:
        """Deregister the slab and end the agent."""
        for handle in self._stuck:
            with contextlib.suppress(Exception):  # the process's end frees it
                handle.release()
        for peer in list(self._peers):
            self.forget(peer)
        with contextlib.suppress(Exception):  # nothing is left to do for what can not be deregistered
            self._agent.deregister_memory(self._registered)
        self._agent = None

    @contextlib.contextmanager
    def _errors(self, peer: str) -> Any:
        # Without their tracebacks: those keep handles alive beyond the agent that has to free them.
        try:
            yield
        except self._disconnected as error:
            raise PeerGone(f"the process of {peer} is gone") from error.with_traceback(None)
        except Exception as error:
            raise TransferFailed(f"NIXL could not read from {peer}: {error!r}") from error.with_traceback(
                None
            )
