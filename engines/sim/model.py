"""The simulated engine's own model, which has a token per byte: how it takes media, the text it answers with, and its encode worker.

The encode worker (`SimEncoder`) makes embeddings of images, one image after the other.
"""

import asyncio
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from headwater.engines import sim
from headwater.engines.embeddings import ImageEncoder, ModelEmbeddings
from headwater.engines.engine import EncodedImage, EngineInfo, EngineUnavailable
from headwater.engines.media import check_data
from headwater.engines.model_files import AUDIO, IMAGE, VIDEO, ModelFiles, byte_tokenizer
from headwater.engines.sim import EMBEDDING_WIDTH
from headwater.engines.sim.scheduler import SimSettings
from headwater.engines.transfer.port import checksum
from headwater.schemas.clock import Clock
from headwater.schemas.events import BlocksStored
from headwater.schemas.media import PromptMedia
from headwater.schemas.tables import AudioSupport, ImageSupport, MediaSupport, VideoSupport

SENTENCES = (
    "The headwater is where the stream begins. "
    "Every block that is stored and every block that is lost becomes an event, "
    "and a router that reads the events in order knows where the next request should go. "
)


def image_support() -> ImageSupport:
    """Return how the simulated model takes images: one token per square of 28 pixels, as Qwen2-VL does."""
    return _squares(IMAGE, sim.IMAGES_PER_PROMPT, sim.IMAGE_PIXELS_MAX)


def media_support() -> MediaSupport:
    """Return how the simulated model takes media: images and videos as Qwen2-VL does, with smaller frames, and audio as Qwen2-Audio does."""
    videos = VideoSupport(
        frame=_squares(VIDEO, sim.VIDEOS_PER_PROMPT, sim.FRAME_PIXELS_MAX),
        per_prompt=sim.VIDEOS_PER_PROMPT,
        frames=sim.VIDEO_FRAMES,
        group=2,
    )
    audio = AudioSupport(
        placeholder=_token(AUDIO),
        per_prompt=sim.AUDIO_PER_PROMPT,
        rate_hz=sim.AUDIO_RATE_HZ,
        samples_max=sim.AUDIO_SAMPLES_MAX,
        stride=sim.AUDIO_STRIDE,
        offset=sim.AUDIO_STRIDE // 2 - 1,
    )
    return MediaSupport(image_support(), videos, audio)


def _squares(token: str, per_prompt: int, pixels_max: int) -> ImageSupport:
    return ImageSupport(
        placeholder=_token(token),
        per_prompt=per_prompt,
        side=sim.IMAGE_SIDE,
        pixels_min=sim.IMAGE_PIXELS_MIN,
        pixels_max=pixels_max,
    )


def _token(text: str) -> int:
    number = byte_tokenizer().token_to_id(text)
    assert number is not None, "one of its special tokens"
    return number


def script(files: ModelFiles | None = None) -> tuple[int, ...]:
    """Token ids of the text that the simulated engine repeats, in the vocabulary of a model's files or its own."""
    tokenizer = byte_tokenizer() if files is None else Tokenizer.from_buffer(files.tokenizer)
    return tuple(tokenizer.encode(SENTENCES, add_special_tokens=False).ids)


FORM = ModelEmbeddings(EMBEDDING_WIDTH, "float32")
"""The form of all embeddings."""


def embedding_of(item: PromptMedia) -> NDArray[np.float32]:
    """The embedding of an item of media, float32 of shape (its tokens, `EMBEDDING_WIDTH`), the same on every worker.

    Raises `RequestRejected` if its data is not all there.
    """
    check_data(item)
    drawn = np.random.default_rng([checksum(np.frombuffer(item.data, np.uint8)), *item.shape])
    return drawn.standard_normal((item.tokens, EMBEDDING_WIDTH), np.float32)


def content_of(embedding: NDArray[Any]) -> int:
    """A number of 32 bits for what an embedding shows."""
    return crc32(np.ascontiguousarray(embedding).tobytes())


# The engine.


class SimEncoder(ImageEncoder):
    """See `headwater.engines.engine.Engine`. Its cache has room for `settings.embedding_tokens`."""

    name = "sim"

    def __init__(self, settings: SimSettings, clock: Clock) -> None:
        super().__init__()
        self.capabilities |= settings.media.capabilities
        self.computed = 0
        """Images encoded so far."""
        self._settings = settings
        self._support = settings.media
        self._clock = clock
        self._open_cache(settings.block_size, settings.embedding_tokens // settings.block_size)
        self._turn = asyncio.Lock()

    async def start(self) -> EngineInfo:
        """See `Engine.start`. Raises `EngineUnavailable` for a model without images."""
        settings = self._settings
        if settings.media.images is None:
            raise EngineUnavailable(f"{settings.model} takes no images that could be encoded apart from it")
        return EngineInfo(
            settings.model,
            settings.block_size,
            self._blocks,
            settings.sequences_max,
            settings.context_length,
            media=settings.media,
        )

    async def _compute(self, item: PromptMedia) -> EncodedImage:
        values = embedding_of(item)
        async with self._turn:
            await self._clock.sleep(self._settings.step_time.encode_seconds([item.tokens]))
        self.computed += 1
        return EncodedImage(values, "float32")

    def cached_blocks(self) -> list[BlocksStored]:
        """The blocks of `held_blocks`, without removing pending events."""
        return self._cache.blocks()

    async def check(self) -> None:
        """See `Engine.check`."""

    async def stop(self) -> None:
        """See `Engine.stop`."""
