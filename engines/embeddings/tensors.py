"""Embeddings as tensors of torch, and as what the transport between workers carries."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from headwater.engines.engine import EncodedImage, EngineError
from headwater.schemas.messages.media import PromptMedia


def tensor_of(image: EncodedImage) -> Any:
    """The embedding as a tensor: one row for each token of the image."""
    import torch

    if image.dtype == "bfloat16":
        return torch.from_numpy(image.values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(image.values))


def encoded_image(tensor: Any, fields: bytes) -> EncodedImage:
    """A tensor in host memory as an embedding. `fields` as in `ImageEmbedding`."""
    if str(tensor.dtype) == "torch.bfloat16":
        import torch

        return EncodedImage(tensor.view(torch.int16).numpy().view(np.uint16), "bfloat16", fields)
    values = tensor.numpy()
    return EncodedImage(values, str(values.dtype), fields)  # type: ignore[arg-type]  # the types of vision encoders are all `DType`s


TOKEN_COUNT: Final = "audio_num_tokens"
"""The field of an audio clip with its number of tokens, as vLLM names it."""


class ModelEmbeddings(NamedTuple):
    """What the embeddings of a model's media look like, as its probe item shows: rows of `width` numbers of `dtype`.

    `patches` of the grid of an image or a video make one token; 0 where the model needs no grid. An engine ends on fewer rows than the prompt has tokens, or on a
    grid of more, and answers wrongly with others.
    """

    width: int
    dtype: str
    patches: int = 0

    def check(self, item: PromptMedia, image: EncodedImage) -> None:
        """Raises `EngineError` unless the engine can use this embedding of the item."""
        shape, wanted = tuple(image.values.shape), (item.tokens, self.width)
        if shape != wanted or image.dtype != self.dtype:
            raise EngineError(
                f"an embedding of the shape {shape} and the type {image.dtype} came for {item.tokens} tokens; this engine "
                f"takes {wanted} and {self.dtype}. Encode workers must have the same model and type as the workers that read from them"
            )
        if not _all_finite(image):
            raise EngineError("an embedding came with numbers that are not finite")
        if image.fields and not self._fits(item, image.fields):
            missing = (
                f"count of its {item.tokens} tokens"
                if item.kind == "audio"
                else f"grid of its {item.tokens} tokens, which have {item.tokens * self.patches} patches"
            )
            raise EngineError(
                f"an embedding came without the {missing}. "
                "Encode workers must have the same model as the workers that read from them"
            )

    def _fits(self, item: PromptMedia, packed: bytes) -> bool:
        try:
            fields = msgspec.json.decode(packed, type=dict[str, Any])
            if item.kind == "audio":
                return bool(fields.get(TOKEN_COUNT) == [item.tokens])
            grids = _grids(fields)
            fits = [math.prod(grid) == item.tokens * self.patches for grid in grids]
        except (msgspec.DecodeError, TypeError):
            return False
        return not self.patches or (bool(fits) and all(fits))


def patches_per_token(item: PromptMedia, fields: Mapping[str, Any]) -> int:
    """Patches of the image's grid for each of its tokens; 0 without a grid."""
    return next((math.prod(grid) // item.tokens for grid in _grids(fields)), 0)


def _grids(fields: Mapping[str, Any]) -> list[Sequence[int]]:
    return [value for name, value in fields.items() if "grid" in name]


def _all_finite(image: EncodedImage) -> bool:
    if image.dtype == "bfloat16":
        # Infinity and what is no number have all bits of the exponent set.
        return not np.any((image.values & 0x7F80) == 0x7F80)
    return bool(np.isfinite(image.values).all())
