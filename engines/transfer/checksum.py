"""XXH3-64, and a copy that computes it on its way.

It reads 15 GB/s where a transfer moves 8; zlib's crc32, with 2.3, would take three times as long as the transfer
itself. It finds accidents, not forgery: who may write to the buffer
may write anything.
"""

from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

PIECE: Final = 1 << 20
"""Bytes copied before they are hashed: still in the core's cache then, so memory is read once."""


def checksum(data: Bytes) -> int:
    """XXH3-64 of contiguous bytes. Does not hold the GIL."""
    return xxhash.xxh3_64_intdigest(data.data)


def copy_checked(into: Bytes, source: Bytes) -> int:
    """Copy `source` to `into` (contiguous, of one size); returns the checksum of what `into` has then.

    Of the copy, not of the source: nobody else can change that any more.
    """
    state = xxhash.xxh3_64()
    for at in range(0, source.nbytes, PIECE):
        piece = into[at : at + PIECE]
        np.copyto(piece, source[at : at + PIECE])
        state.update(piece.data)
    return state.intdigest()
