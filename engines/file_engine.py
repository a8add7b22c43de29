"""Engines that generate files, images or videos, and no tokens: their base, and the turns of their requests, one at a time by priority."""

import asyncio
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Final, TypeVar

import msgspec

from headwater.engines.engine import (
    FILE_CAPABILITIES,
    Emit,
    EngineBase,
    EngineInfo,
    EngineLoad,
    EngineUnavailable,
    KvEvent,
    Transfer,
)
from headwater.schemas.events import BlocksStored
from headwater.schemas.inference import GenerateRequest
from headwater.schemas.tables import Capability, ImageGenerationSupport, VideoGenerationSupport


class PriorityTurns:
    """One holder at a time; of those that wait, the one with the lowest number is next, then the one that came first."""

    def __init__(self) -> None:
        self._queue: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = count()
        self.running = 0

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return sum(not turn.done() for _, _, turn in self._queue)

    @asynccontextmanager
    async def turn(self, priority: int) -> AsyncIterator[None]:
        """Wait until no request runs and none that waits has a lower number as its priority, or came before."""
        if self.running:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._queue, (priority, next(self._numbers), turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._pass_on()
                raise
        self.running = 1
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        """Let the next request run; `running` stays set for it, so that no other begins in between."""
        while self._queue:
            _, _, turn = heapq.heappop(self._queue)
            if not turn.done():
                turn.set_result(None)
                return
        self.running = 0


BLOCK_SIZE: Final = 16
TOTAL_BLOCKS: Final = 4_096
"""Not used, but the events by which a worker joins its pool have sizes of a KV cache."""


class FileEngine(EngineBase):
    """Base of such an engine. It has no KV cache and no tokens: calls that concern these are rejected, and values empty.

    `model` is the name of the model for clients.
    """

    capabilities: frozenset[Capability] = frozenset({"priority", "seed"})
    possible = FILE_CAPABILITIES

    def __init__(self, model: str, context_length: int) -> None:
        self._model = model
        self._context_length = context_length
        self._turns = PriorityTurns()

    def _info(
        self, version: str, images: ImageGenerationSupport | None, videos: VideoGenerationSupport | None
    ) -> EngineInfo:
        """Return what `start` returns."""
        return EngineInfo(
            self._model,
            BLOCK_SIZE,
            TOTAL_BLOCKS,
            1,
            self._context_length,
            version=version,
            image_generation=images,
            video_generation=videos,
        )

    def submit(self, request: GenerateRequest, emit: Emit, transfer: Transfer | None = None) -> None:
        """See `Engine.submit`: there are no tokens."""
        self._reject("generate")

    def abort(self, request: str) -> None:
        """See `Engine.abort`: there is nothing to abort, as nothing is submitted."""

    async def kv_events(self) -> AsyncIterator[list[KvEvent]]:
        """See `Engine.kv_events`: never any."""
        await asyncio.Event().wait()
        yield []

    def held_blocks(self) -> list[BlocksStored]:
        """See `Engine.held_blocks`."""
        return []

    def load(self) -> EngineLoad:
        """See `Engine.load`."""
        return EngineLoad(self._turns.running, self._turns.waiting, 0, TOTAL_BLOCKS)

    async def clear_kv(self) -> None:
        """See `Engine.clear_kv`."""


OptionsT = TypeVar("OptionsT")


def read_options(options: dict[str, object], kind: type[OptionsT], engine: str) -> OptionsT:
    """The `--engine-options` of such an engine. Raises `EngineUnavailable` naming the option at fault."""
    try:
        return msgspec.convert(options, kind)
    except msgspec.ValidationError as error:
        raise EngineUnavailable(f"--engine-options of the {engine} engine: {error}") from error
