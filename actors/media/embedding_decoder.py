"""Decoding of precomputed embeddings: a safetensors tensor of the model's type and width, with finite values, and its grid of patches."""

from typing import Any, BinaryIO, Final

import numpy as np
from safetensors import SafetensorError, deserialize

from headwater.actors.media.image_decoder import malformed
from headwater.actors.media.request import (
    GRID,
    DecodedMedia,
    EmbeddingForm,
    EmbeddingLimits,
    FileFormat,
    MediaCode,
    MediaError,
    Sink,
)

EXPONENTS: Final[dict[str, Any]] = {
    "F32": np.uint32(0x7F80_0000),
    "F16": np.uint16(0x7C00),
    "BF16": np.uint16(0x7F80),
}
"""The bits of the exponent by type: all set in infinities and in what is no number."""

GRID_TYPES: Final[dict[str, np.dtype[Any]]] = {"I64": np.dtype("<i8"), "I32": np.dtype("<i4")}
GRID_MAX: Final = 4_096


def decode_embedding(
    file: BinaryIO, form: FileFormat, limits: EmbeddingLimits, expected: EmbeddingForm, out: Sink
) -> DecodedMedia:
    """Write values of shape (tokens, width) to `out`, in their own type. Raises `MediaError`."""
    try:
        tensors = deserialize(file.read())  # type: ignore[no-untyped-call]  # safetensors publishes no types for it
    except SafetensorError as error:
        raise malformed(form, "it cannot be read") from error
    named = dict(tensors)
    grid = _grid(named.pop(GRID, None)) if expected.grid else ()
    if len(named) != 1:
        raise _bad(
            f"the file has {len(tensors)} tensors in place of one{f' and {GRID}' if expected.grid else ''}"
        )
    (tensor,) = named.values()
    dtype, shape, data = str(tensor["dtype"]), tuple(tensor["shape"]), tensor["data"]
    if dtype not in expected.dtypes:
        raise _bad(f"its type is {dtype}; accepted: {', '.join(expected.dtypes)}")
    if len(shape) == 3 and shape[0] == 1:
        shape = shape[1:]
    if len(shape) != 2 or shape[1] != expected.width:
        raise _bad(f"its shape is {list(shape)} in place of [tokens, {expected.width}]")
    if not 1 <= shape[0] <= limits.tokens_max:
        raise _bad(f"it stands for {shape[0]} tokens; 1 to {limits.tokens_max} are accepted")
    bits = EXPONENTS[dtype]
    if ((np.frombuffer(data, bits.dtype) & bits) == bits).any():
        raise _bad("it has values that are infinite or no numbers")
    out.write(data)
    return DecodedMedia(dtype, shape, form.name, grid=grid)


def _grid(tensor: Any) -> tuple[int, ...]:
    """The grid of one image's patches."""
    if tensor is None:
        raise _bad(f"the file has no tensor {GRID}")
    if tensor["dtype"] not in GRID_TYPES or len(tensor["data"]) != 3 * GRID_TYPES[tensor["dtype"]].itemsize:
        raise _bad(f"{GRID} is not three whole numbers")
    grid = tuple(np.frombuffer(tensor["data"], GRID_TYPES[tensor["dtype"]]).tolist())
    if grid[0] != 1 or min(grid) < 1 or max(grid) > GRID_MAX:
        raise _bad(f"{GRID} is {list(grid)}; that of an image is 1, rows and columns of at most {GRID_MAX}")
    return grid


def _bad(reason: str) -> MediaError:
    return MediaError(MediaCode.BAD_EMBEDDING, f"The precomputed embedding is not accepted: {reason}.")
