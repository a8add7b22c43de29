"""Width and height of an image from its header, before a decoder allocates anything for its pixels."""

import struct
from typing import BinaryIO, Final

from headwater.actors.media.decoders.formats import GIF, JPEG, PNG, WEBP, FileFormat
from headwater.actors.media.request.errors import MediaCode, MediaError

HEAD_BYTES: Final = 32

_FRAME_STARTS: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_WITHOUT_LENGTH: Final = frozenset((0x01, *range(0xD0, 0xD8)))


def image_size(file: BinaryIO, form: FileFormat) -> tuple[int, int]:
    """(width, height) as the file's header states them. Raises `MediaError`. Leaves the file at its beginning."""
    readers = {PNG: _png, GIF: _gif, WEBP: _webp, JPEG: _jpeg}
    file.seek(0)
    try:
        width, height = readers[form](file)
    except (struct.error, IndexError) as error:
        raise malformed(form, "its header is cut short") from error
    file.seek(0)
    if width < 1 or height < 1:
        raise malformed(form, "it has no pixels")
    return width, height


def malformed(form: FileFormat, reason: str) -> MediaError:
    """The error for a file that breaks its own format."""
    return MediaError(MediaCode.MALFORMED, f"The {form.name} file is malformed: {reason}.")


def _png(file: BinaryIO) -> tuple[int, int]:
    head = file.read(HEAD_BYTES)
    if head[12:16] != b"IHDR":
        raise malformed(PNG, "it does not begin with its header")
    width, height = struct.unpack_from(">II", head, 16)
    return width, height


def _gif(file: BinaryIO) -> tuple[int, int]:
    width, height = struct.unpack_from("<HH", file.read(HEAD_BYTES), 6)
    return width, height


def _webp(file: BinaryIO) -> tuple[int, int]:
    head = file.read(HEAD_BYTES)
    kind = head[12:16]
    if kind == b"VP8X":
        return 1 + int.from_bytes(head[24:27], "little"), 1 + int.from_bytes(head[27:30], "little")
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", head, 21)
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", head, 26)
        return width & 0x3FFF, height & 0x3FFF
    raise malformed(WEBP, "its first chunk is unknown")


def _jpeg(file: BinaryIO) -> tuple[int, int]:
    """From the first start of frame; the segments before it are skipped by their lengths."""
    file.seek(2)
    while True:
        mark = file.read(1)
        if mark != b"\xff":
            raise malformed(JPEG, "a marker is missing")
        while (code := file.read(1)) == b"\xff":
            pass
        if code[0] in _WITHOUT_LENGTH:
            continue
        (length,) = struct.unpack(">H", file.read(2))
        if code[0] in _FRAME_STARTS:
            height, width = struct.unpack_from(">HH", file.read(5), 1)
            return width, height
        if code[0] in (0xD9, 0xDA) or length < 2:
            raise malformed(JPEG, "it has no frame")
        file.seek(length - 2, 1)
