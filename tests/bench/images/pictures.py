"""Pictures for load tests: smooth, so that they are small as files and cost their receiver little to decode."""

import base64
import struct
import zlib

import numpy as np


def data_url(seed: int, side: int) -> str:
    """A square PNG of `side` pixels as a data URL; each seed gives another one."""
    draw = np.random.default_rng(seed)
    x = np.arange(side, dtype=np.uint32)
    slopes, offsets = draw.integers(1, 4, (3, 2)), draw.integers(0, 255, 3)
    channels = [
        (x[:, None] * a // 4 + x[None, :] * b // 4 + c) % 256
        for (a, b), c in zip(slopes, offsets, strict=True)
    ]
    pixels = np.stack(channels, axis=-1).astype(np.uint8)
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    file = (
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", header)
        + _chunk(b"IDAT", zlib.compress(rows))
        + _chunk(b"IEND", b"")
    )
    return "data:image/png;base64," + base64.b64encode(file).decode()


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
