"""Image files of tests: valid ones, and ones that claim more than they are."""

import base64
import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image


def picture(width: int = 6, height: int = 4) -> Image.Image:
    """A small image whose pixels all differ."""
    count = width * height
    return Image.frombytes("RGB", (width, height), bytes((7 * n) % 256 for n in range(3 * count)))


def encoded(image: Image.Image, form: str, **options: Any) -> bytes:
    """An image as a file."""
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def data_url(data: bytes, mime: str = "image/png") -> str:
    """A file as a data URL."""
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def chunk(name: bytes, data: bytes) -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, *extra: bytes, rows: bytes | None = None) -> bytes:
    """A gray PNG that claims this size; `rows` are its packed pixels, one row if not given; `extra` chunks before them."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    body = chunk(b"IDAT", rows if rows is not None else zlib.compress(bytes(min(width, 4096) + 1)))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(extra) + body + chunk(b"IEND", b"")


def zeros(count: int) -> bytes:
    """That many zero bytes, packed about a thousand times."""
    packer = zlib.compressobj(9)
    piece = bytes(1 << 20)
    parts = [packer.compress(piece) for _ in range(count >> 20)]
    return b"".join([*parts, packer.compress(bytes(count % (1 << 20))), packer.flush()])


def jpeg_of_size(width: int, height: int) -> bytes:
    """A real JPEG whose frame header claims another size."""
    data = bytearray(encoded(picture(16, 16), "JPEG"))
    at = data.index(b"\xff\xc0")
    data[at + 5 : at + 9] = struct.pack(">HH", height, width)
    return bytes(data)


def webp_of_size(width: int, height: int) -> bytes:
    """A WebP whose extended header claims this canvas."""
    body = encoded(picture(16, 16), "WEBP")[12:]
    flags_and_size = bytes(4) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    whole = b"WEBP" + b"VP8X" + struct.pack("<I", 10) + flags_and_size + body
    return b"RIFF" + struct.pack("<I", len(whole)) + whole


def gif_of_size(width: int, height: int, frame: tuple[int, int]) -> bytes:
    """A GIF whose header claims one size, and its first frame another."""
    data = bytearray(encoded(Image.new("P", (16, 16)), "GIF"))
    data[6:10] = struct.pack("<HH", width, height)
    at = data.index(b"\x2c", 13)
    data[at + 5 : at + 9] = struct.pack("<HH", *frame)
    return bytes(data)


def noise(size: int) -> Image.Image:
    """An image that does not compress: `size` by `size` pixels, 3 bytes each."""
    values = np.random.default_rng(0).integers(0, 256, (size, size, 3), np.uint8)
    return Image.fromarray(values)


def scan_bomb() -> bytes:
    """A progressive JPEG of 16 megapixels whose last scan is repeated: each repetition is all of the work again."""
    data = encoded(Image.new("L", (4096, 4096)), "JPEG", progressive=True, quality=10)
    last = data.rindex(b"\xff\xda")
    scan = data[last:-2]
    return data[:-2] + scan * min(2000, 6_000_000 // len(scan)) + data[-2:]
