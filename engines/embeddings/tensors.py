"""Embeddings as tensors of torch, and as what the transport between workers carries."""

from typing import Any

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


def check_shape(item: PromptMedia, tensor: Any, width: int) -> None:
    """Raises `EngineError` unless there is a row of `width` numbers for each token of the image.

    An engine ends on fewer rows than the prompt has tokens, and takes others silently.
    """
    shape = tuple(tensor.shape)
    if shape != (item.tokens, width):
        raise EngineError(
            f"an image embedding of the shape {shape} came for {item.tokens} tokens; this engine takes {(item.tokens, width)}. "
            "Encode workers must have the same model as the workers that read from them"
        )
