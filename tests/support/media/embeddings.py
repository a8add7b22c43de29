"""Embeddings of images as clients send them: safetensors in base64, with the grid of patches."""

import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save


def embedding_file(values: NDArray[Any], grid: tuple[int, ...] = (), **others: NDArray[Any]) -> bytes:
    """A file with an embedding, shape (tokens, width), its grid if there is one, and other tensors."""
    tensors = {"image_embeds": values, **others}
    if grid:
        tensors["image_grid_thw"] = np.array(grid, np.int64)
    return save(tensors)


def embedding_part(file: bytes) -> dict[str, str]:
    """The part of a message."""
    return {"type": "image_embeds", "image_embeds": base64.b64encode(file).decode()}
