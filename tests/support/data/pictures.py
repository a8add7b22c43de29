"""An engine whose images are a function of the seed and the prompt, for fleets of production actors."""

import asyncio
import hashlib
from typing import Any

from headwater.engines.engine import EmitFile, EngineInfo, FileStep
from headwater.engines.sim.engine import SimEngine
from headwater.schemas.inference import ImageRequest
from headwater.schemas.tables import Capability, ImageGenerationSupport

SUPPORT = ImageGenerationSupport(
    width=64, height=64, side_multiple=8, side_min=64, side_max=256, steps=4, steps_max=100, images_max=4
)
BYTES = 1_300_000
"""Of an image: three pieces."""


def picture(request: ImageRequest, number: int) -> bytes:
    """Image number `number`."""
    text = f"{request.prompt} {request.seed + number} {request.width}x{request.height} {request.format}"
    digest = hashlib.sha256(text.encode()).digest()
    return digest * (BYTES // len(digest))


def preview(number: int, step: int) -> bytes:
    """The preview of an image after a step."""
    return b"preview %d after %d" % (number, step)


class PictureEngine(SimEngine):
    """The simulated engine with images: `step_s` for each step. It keeps what it was asked and what was cancelled."""

    capabilities: frozenset[Capability] = SimEngine.capabilities | {"image_generation"}
    step_s = 0.5

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.asked: list[ImageRequest] = []
        self.cancelled: list[str] = []
        self.failure: Exception | None = None
        self.too_few = 0

    async def start(self) -> EngineInfo:
        """See `Engine.start`."""
        return (await super().start())._replace(image_generation=SUPPORT)

    async def generate_images(self, request: ImageRequest, emit: EmitFile) -> None:
        """See `Engine.generate_images`."""
        self.asked.append(request)
        if self.failure is not None:
            raise self.failure
        try:
            for number in range(request.first, request.count - self.too_few):
                for step in range(1, request.steps + 1):
                    await self._clock.sleep(self.step_s)
                    shown = preview(number, step) if step <= request.previews else b""
                    emit(FileStep(number, step, shown, step - 1 if shown else -1))
                emit(FileStep(number, request.steps, picture(request, number)))
        except asyncio.CancelledError:
            self.cancelled.append(request.request)
            raise
