"""Pixels as a PNG file, without a library: SGLang's server takes files."""

import struct
import zlib
from typing import Final

from headwater.engines.engine import RequestRejected
from headwater.schemas.messages.media import PromptMedia

SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
RGB: Final = 2
FAST: Final = 1
"""Level of compression: the file goes to a server on this machine."""


def png(item: PromptMedia) -> bytes:
    """An image of shape (height, width, 3), uint8. Raises `RequestRejected` for one without its data."""
    height, width, _ = item.shape
    if len(item.data) != item.size:
        raise RequestRejected(f"an image of {item.size} bytes came with {len(item.data)}", param="image")
    row = 3 * width
    # Each row begins with the number of its filter, 0 for none.
    rows = b"".join(b"\0" + item.data[at : at + row] for at in range(0, len(item.data), row))
    header = struct.pack(">IIBBBBB", width, height, 8, RGB, 0, 0, 0)
    return (
        SIGNATURE
        + _chunk(b"IHDR", header)
        + _chunk(b"IDAT", zlib.compress(rows, FAST))
        + _chunk(b"IEND", b"")
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
