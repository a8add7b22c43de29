"""Decoding of images to pixels (uint8, RGB, upright, over white) or to their transparency alone. Metadata never leaves this module.

Only the first frame of an animated image is decoded.
"""

import struct
import zlib
from collections.abc import Callable
from typing import BinaryIO, Final

from PIL import GifImagePlugin, Image, ImageFile, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

from headwater.actors.media.request import (
    GIF,
    JPEG,
    PNG,
    WEBP,
    DecodedMedia,
    FileFormat,
    ImageLimits,
    MediaCode,
    MediaError,
    Sink,
)

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
    """Return the size from the first start of frame; the segments before it are skipped by their lengths."""
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


# Pixels.

BAND_ROWS: Final = 256
"""Converted at once, so that an image is not in memory twice."""

READERS: Final[dict[FileFormat, Callable[[BinaryIO], ImageFile.ImageFile]]] = {
    PNG: PngImagePlugin.PngImageFile,
    JPEG: JpegImagePlugin.JpegImageFile,
    WEBP: WebPImagePlugin.WebPImageFile,
    GIF: GifImagePlugin.GifImageFile,
}
"""The classes themselves: no other of the library's many formats is ever tried."""

ORIENTATION: Final = 0x0112
TURNS: Final = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What undoes each orientation of EXIF."""

_WHITE: Final = (255, 255, 255)


def decode_image(
    file: BinaryIO, form: FileFormat, limits: ImageLimits, out: Sink, *, mask: bool = False
) -> DecodedMedia:
    """Write pixels of shape (height, width, 3) to `out`; with `mask` (height, width, 1), 255 where it is transparent. Raises `MediaError`."""
    stated = image_size(file, form)
    _check_pixels(stated, limits)
    Image.MAX_IMAGE_PIXELS = limits.pixels_max  # checked by the library for what is in no header
    try:
        with READERS[form](file) as image:
            # A GIF's first frame may be larger than the size in its header.
            _check_pixels(image.size, limits)
            image.load()
            upright = _upright(image)
    except (
        OSError,
        SyntaxError,
        ValueError,
        EOFError,
        KeyError,
        IndexError,
        TypeError,
        AttributeError,
    ) as error:
        raise malformed(form, "it cannot be decoded") from error
    except Image.DecompressionBombError as error:
        raise _too_many_pixels(stated, limits) from error
    except (struct.error, zlib.error) as error:
        raise malformed(form, "it cannot be decoded") from error
    width, height = upright.size
    if mask and not _may_be_clear(upright):
        raise MediaError(
            MediaCode.WRONG_TYPE,
            "The mask has no transparency: its transparent areas are what is changed. Send a PNG with an alpha channel.",
        )
    for top in range(0, height, BAND_ROWS):
        band = upright.crop((0, top, width, min(height, top + BAND_ROWS)))
        out.write((_transparency(band) if mask else _rgb(band)).tobytes())
    return DecodedMedia("uint8", (height, width, 1 if mask else 3), form.name)


def _check_pixels(size: tuple[int, int], limits: ImageLimits) -> None:
    if size[0] * size[1] > limits.pixels_max:
        raise _too_many_pixels(size, limits)


def _too_many_pixels(size: tuple[int, int], limits: ImageLimits) -> MediaError:
    return MediaError(
        MediaCode.TOO_MANY_PIXELS,
        f"The image has {size[0]} x {size[1]} pixels or more; at most {limits.pixels_max} are accepted. Scale it down.",
    )


def _upright(image: Image.Image) -> Image.Image:
    """Turned as its orientation in EXIF says; metadata that cannot be read count as none."""
    try:
        turn = TURNS.get(image.getexif().get(ORIENTATION, 1))
    except (OSError, SyntaxError, ValueError, KeyError, IndexError, TypeError, AttributeError, struct.error):
        return image
    return image if turn is None else image.transpose(turn)


def _rgb(band: Image.Image) -> Image.Image:
    """8 bits a channel; transparency over white, as models are trained with."""
    if band.mode.startswith("I;16"):
        return band.point(lambda value: value / 256).convert("L").convert("RGB")
    if _may_be_clear(band):
        clear = band.convert("RGBA")
        flat = Image.new("RGB", clear.size, _WHITE)
        flat.paste(clear, mask=clear.getchannel("A"))
        return flat
    return band.convert("RGB")


def _may_be_clear(image: Image.Image) -> bool:
    return image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info


def _transparency(band: Image.Image) -> Image.Image:
    return band.convert("RGBA").getchannel("A").point(lambda value: 255 - value)
