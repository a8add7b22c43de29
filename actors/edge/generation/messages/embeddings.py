"""Embeddings that clients send in place of images: what a model takes of them, and what image each stands for. Pure."""

from typing import Final

import msgspec

from headwater.actors.media.item import MediaItem
from headwater.actors.media.request.source import GRID, EmbeddingForm, TensorType
from headwater.schemas.messages.media import ClientEmbedding
from headwater.schemas.messages.transfer import DType
from headwater.schemas.tables.card import EmbeddingSupport, ImageSupport, ModelCard

TENSOR_TYPES: Final[dict[DType, TensorType]] = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""As safetensors spells them."""


def form_of(card: ModelCard) -> EmbeddingForm | None:
    """What the media intake checks embeddings against; None where clients may send none."""
    support = card.image_embeddings
    if support is None or card.images is None:
        return None
    return EmbeddingForm(support.width, (TENSOR_TYPES[support.dtype],), grid=bool(support.merge))


def image_shape(item: MediaItem, images: ImageSupport, support: EmbeddingSupport) -> tuple[int, int, int]:
    """The shape of an image whose embedding this could be. Raises `ValueError` for a grid of patches that no image has."""
    if not support.merge:
        return 1, 1, 3
    _, rows, columns = item.grid
    if rows % support.merge or columns % support.merge:
        raise ValueError(f"its grid of {rows} x {columns} patches is not divisible by {support.merge}")
    patch = images.side // support.merge
    return rows * patch, columns * patch, 3


def given_of(item: MediaItem) -> ClientEmbedding:
    """What a worker needs to know of the embedding."""
    dtype = next(name for name, spelled in TENSOR_TYPES.items() if spelled == item.dtype)
    return ClientEmbedding(dtype, item.width, msgspec.json.encode({GRID: item.grid} if item.grid else {}))
