"""Precomputed embeddings: one tensor in safetensors, of the type and width that the model takes, with finite values."""

from typing import Any, BinaryIO, Final

import numpy as np
from safetensors import SafetensorError, deserialize

from headwater.actors.media.decoders.formats import FileFormat
from headwater.actors.media.decoders.image_size import malformed
from headwater.actors.media.decoders.result import DecodedMedia, Sink
from headwater.actors.media.request.errors import MediaCode, MediaError
from headwater.actors.media.request.settings import EmbeddingLimits
from headwater.actors.media.request.source import EmbeddingForm

EXPONENTS: Final[dict[str, Any]] = {
    "F32": np.uint32(0x7F80_0000),
    "F16": np.uint16(0x7C00),
    "BF16": np.uint16(0x7F80),
}
"""The bits of the exponent by type: all set in infinities and in what is no number."""


def decode_embedding(
    file: BinaryIO, form: FileFormat, limits: EmbeddingLimits, expected: EmbeddingForm, out: Sink
) -> DecodedMedia:
    """Write values of shape (tokens, width) to `out`, in their own type. Raises `MediaError`."""
    try:
        tensors = deserialize(file.read())  # type: ignore[no-untyped-call]  # as published
    except SafetensorError as error:
        raise malformed(form, "it cannot be read") from error
    if len(tensors) != 1:
        raise _bad(f"the file has {len(tensors)} tensors in place of one")
    _, tensor = tensors[0]
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
    return DecodedMedia(dtype, shape, form.name)


def _bad(reason: str) -> MediaError:
    return MediaError(MediaCode.BAD_EMBEDDING, f"The precomputed embedding is not accepted: {reason}.")
