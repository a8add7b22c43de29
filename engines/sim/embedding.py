"""What a simulated vision encoder computes: numbers that depend on every pixel, so that answers differ between images."""

from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from headwater.engines.images.prompt import check_pixels
from headwater.engines.sim.defaults import EMBEDDING_WIDTH
from headwater.engines.transfer.checksum import checksum
from headwater.schemas.messages.media import PromptMedia


def embedding_of(item: PromptMedia) -> NDArray[np.float32]:
    """The embedding of an image, float32 of shape (its tokens, `EMBEDDING_WIDTH`), the same on every worker.

    Raises `RequestRejected` if its data is not all there.
    """
    check_pixels(item)
    drawn = np.random.default_rng([checksum(np.frombuffer(item.data, np.uint8)), *item.shape])
    return drawn.standard_normal((item.tokens, EMBEDDING_WIDTH), np.float32)


def content_of(embedding: NDArray[Any]) -> int:
    """A number of 32 bits for what an embedding shows."""
    return crc32(np.ascontiguousarray(embedding).tobytes())
