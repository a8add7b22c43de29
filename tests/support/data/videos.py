"""An engine whose videos are a function of what was asked, for fleets of production actors."""

import asyncio
import hashlib
from typing import Any

import msgspec

from headwater.engines.engine import EmitFile, EngineInfo, FileStep
from headwater.engines.sim.engine import SimEngine
from headwater.schemas.inference import VideoRequest
from headwater.schemas.tables import Capability, VideoGenerationSupport

SUPPORT = VideoGenerationSupport(
    width=64,
    height=64,
    side_multiple=8,
    side_min=64,
    side_max=256,
    pixels_max=128 * 128,
    fps=8,
    frames=17,
    frames_multiple=4,
    frames_max=81,
    steps=4,
    steps_max=100,
)
BYTES = 1_300_000
"""Of a video: three pieces."""


def video(request: VideoRequest) -> bytes:
    """The file."""
    digest = hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(request, request=""))).digest()
    return digest * (BYTES // len(digest))


class VideoEngine(SimEngine):
    """The simulated engine with videos: `step_s` for each step. It keeps what it was asked and what was cancelled."""

    capabilities: frozenset[Capability] = SimEngine.capabilities | {"video_generation"}
    step_s = 0.5

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.asked: list[VideoRequest] = []
        self.cancelled: list[str] = []
        self.failure: Exception | None = None

    async def start(self) -> EngineInfo:
        """See `Engine.start`."""
        return (await super().start())._replace(video_generation=SUPPORT)

    async def generate_video(self, request: VideoRequest, emit: EmitFile) -> None:
        """See `Engine.generate_video`."""
        self.asked.append(request)
        if self.failure is not None:
            raise self.failure
        try:
            for step in range(1, request.steps + 1):
                await self._clock.sleep(self.step_s)
                emit(FileStep(0, step))
            emit(FileStep(0, request.steps, video(request)))
        except asyncio.CancelledError:
            self.cancelled.append(request.request)
            raise
