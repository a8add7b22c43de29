"""XXH3-64, and a copy that computes it.

It reads 15 GB/s where a transfer moves 8; zlib's crc32, with 2.3, would take three times as long as the transfer itself. It
detects accidents, not forgery.
"""

from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

PIECE: Final = 1 << 20
"""Bytes copied before they are hashed: they are then still in the core's cache, so memory is read once."""


def checksum(data: Bytes) -> int:
    """XXH3-64 of contiguous bytes. Does not hold the GIL."""
    return xxhash.xxh3_64_intdigest(data.data)


def copy_checked(into: Bytes, source: Bytes) -> int:
    """Copy `source` to `into` (contiguous, of one size); returns the checksum of what `into` has then.

    Of the copy, not of the source, which others may change.
    """
    state = xxhash.xxh3_64()
    for at in range(0, source.nbytes, PIECE):
        piece = into[at : at + PIECE]
        np.copyto(piece, source[at : at + PIECE])
        state.update(piece.data)
    return state.intdigest()
