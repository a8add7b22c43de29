"""What a simulated vision encoder computes: numbers that depend on every pixel and sample, so that answers differ between items of media."""

from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from headwater.engines.embeddings.tensors import ModelEmbeddings
from headwater.engines.media.prompt import check_data
from headwater.engines.sim.defaults import EMBEDDING_WIDTH
from headwater.engines.transfer.checksum import checksum
from headwater.schemas.messages.media import PromptMedia

FORM = ModelEmbeddings(EMBEDDING_WIDTH, "float32")
"""Of all embeddings."""


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
