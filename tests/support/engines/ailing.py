"""An engine in one file that is misconfigured as real ones are: `--engine-options` say how.

silent      it serves, declares KV events and publishes none
hashes      it announces blocks under hashes of its own
everywhere  it opens a socket on all addresses of the machine
fails       why it does not start
version     the version that it says it has
pairs_with  the engines that it exchanges KV with
"""

import asyncio
import socket
from collections.abc import AsyncIterator

import numpy as np

from headwater.engines.custom import (
    BlocksStored,
    EngineInfo,
    EngineRequest,
    EngineSetup,
    KvEvent,
    Pinned,
    hashing,
)


class Ailing:
    """Echoes prompts, and keeps their blocks for ever."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[list[KvEvent]] = asyncio.Queue()
        self._sockets: list[socket.socket] = []

    async def start(self, setup: EngineSetup) -> EngineInfo:
        """Read the options."""
        self._options = setup.options
        if reason := self._options.get("fails"):
            raise RuntimeError(reason)
        self._block_size = setup.block_size
        if self._options.get("everywhere"):
            self._sockets.append(socket.create_server(("0.0.0.0", 0)))
        return setup.info(
            version=str(self._options.get("version", "")), pairs_with=str(self._options.get("pairs_with", ""))
        )

    async def generate(self, request: EngineRequest) -> AsyncIterator[int]:
        """Announce the prompt's blocks, or what the options say, and echo it."""
        tokens = np.array(request.tokens, np.uint32)
        if self._options.get("hashes"):
            tokens = tokens + np.uint32(1)
        hashes = hashing.sequence_hashes(tokens, self._block_size)
        if len(hashes) and not self._options.get("silent"):
            self._events.put_nowait([BlocksStored(0, hashing.pack_hashes(hashes))])
        for token in request.tokens:
            yield token

    async def kv_events(self) -> AsyncIterator[list[KvEvent]]:
        """What `generate` announced."""
        while True:
            yield await self._events.get()

    async def prefill(self, request: EngineRequest) -> Pinned:
        """It can hand over, as it says."""
        return Pinned(b"", 60.0)

    async def release(self, request: str, params: bytes) -> None:
        """Nothing is held."""
