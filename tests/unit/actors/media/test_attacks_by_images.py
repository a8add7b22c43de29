"""Files that are not what they claim, or much larger than they look: each is rejected before it costs anything."""

import io
import struct
import zipfile
import zlib
from collections.abc import Callable

import pytest

from headwater.actors.media.intake import MediaIntake
from headwater.actors.media.request import FetchPolicy, IntakeSettings, MediaSource
from tests.support.media import images
from tests.support.media.images import chunk, data_url, encoded, picture, png, zeros
from tests.unit.actors.media.conftest import TIGHT, closing, rejection

PIXELS = "media_too_many_pixels"
MALFORMED = "media_malformed"
UNKNOWN = "media_unknown_type"

PNG = encoded(picture(), "PNG")
JPEG = encoded(picture(), "JPEG")


def archive() -> bytes:
    """A ZIP file with an image after it."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as made:
        made.writestr("a.txt", "a")
    return out.getvalue() + PNG


FILES: dict[str, tuple[Callable[[], bytes], str]] = {
    "PNG that claims 4 gigapixels": (lambda: png(65_535, 65_535), PIXELS),
    "PNG that claims the most there is": (lambda: png(2**31 - 1, 2**31 - 1), PIXELS),
    "PNG that unpacks to 25 MB": (lambda: png(5_000, 5_000, rows=zeros(5_001 * 5_000)), PIXELS),
    "long thin PNG": (lambda: png(2**31 - 1, 1), PIXELS),
    "JPEG that claims 4 gigapixels": (lambda: images.jpeg_of_size(65_535, 65_535), PIXELS),
    "WebP that claims 268 megapixels": (lambda: images.webp_of_size(16_384, 16_384), PIXELS),
    "WebP that claims the most there is": (lambda: images.webp_of_size(1 << 24, 255), PIXELS),
    "GIF that claims 4 gigapixels": (lambda: images.gif_of_size(65_535, 65_535, (1, 1)), PIXELS),
    "GIF with a frame larger than it": (lambda: images.gif_of_size(1, 1, (65_535, 65_535)), PIXELS),
    "GIF with a frame a little too large": (lambda: images.gif_of_size(1, 1, (1200, 1000)), PIXELS),
    "PNG without pixels": (lambda: png(0, 10), MALFORMED),
    "PNG with a text that unpacks to 20 MB": (
        lambda: png(4, 1, chunk(b"zTXt", b"a\0\0" + zeros(20 << 20)), rows=zlib.compress(bytes(5))),
        MALFORMED,
    ),
    "PNG with texts that unpack to 90 MB": (
        lambda: png(4, 1, *[chunk(b"zTXt", b"a\0\0" + zeros(1 << 20))] * 90, rows=zlib.compress(bytes(5))),
        MALFORMED,
    ),
    "PNG with a chunk longer than the file": (
        lambda: PNG[:8] + struct.pack(">I", 2**31 - 1) + b"IHDR" + PNG[16:40],
        MALFORMED,
    ),
    "PNG with a wrong checksum": (lambda: PNG[:29] + bytes(4) + PNG[33:], MALFORMED),
    "cut PNG": (lambda: PNG[:-30], MALFORMED),
    "cut JPEG": (lambda: encoded(images.noise(32), "JPEG")[:-500], MALFORMED),
    "JPEG without a frame": (lambda: JPEG[:2] + b"\xff\xd9", MALFORMED),
    "JPEG of segments without end": (lambda: b"\xff\xd8\xff\xe0\xff\xff" + bytes(100), MALFORMED),
    "JPEG of markers only": (lambda: b"\xff\xd8" + b"\xff" * 100_000, MALFORMED),
    "cut WebP": (lambda: encoded(images.noise(32), "WEBP")[:-200], MALFORMED),
    "cut GIF": (lambda: encoded(picture(), "GIF")[:20], MALFORMED),
    "GIF that is a script": (lambda: b"GIF89a/*" + bytes(4) + b"*/=1;alert(1)//", MALFORMED),
    "first bytes only": (lambda: PNG[:8], MALFORMED),
    "PDF with a JPEG in it": (lambda: b"%PDF-1.4\n" + JPEG, "media_wrong_type"),
    "ZIP with a PNG after it": (archive, UNKNOWN),
    "page with a PNG in it": (lambda: b"<!doctype html><script>alert(1)</script>" + PNG, UNKNOWN),
    "SVG that names a file": (
        lambda: b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
        UNKNOWN,
    ),
    "PostScript": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(%pipe%id) (r) file", UNKNOWN),
    "TIFF": (lambda: encoded(picture(), "TIFF"), UNKNOWN),
    "BMP": (lambda: encoded(picture(), "BMP"), UNKNOWN),
    "program": (lambda: b"\x7fELF" + bytes(60), UNKNOWN),
    "playlist": (lambda: b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", UNKNOWN),
    "text": (lambda: b"hello", UNKNOWN),
    "sound": (lambda: b"RIFF\x24\0\0\0WAVEfmt " + bytes(40), "media_wrong_type"),
    "too large": (lambda: PNG + bytes(300_000), "media_too_large"),
    "empty": (lambda: b"", "media_empty"),
}


@pytest.mark.parametrize("attack", FILES)
async def test_a_file_is_rejected_by_its_contents(strict: MediaIntake, attack: str) -> None:
    """Whatever type its data URL declares."""
    make, code = FILES[attack]
    error = await rejection(strict, MediaSource.from_bytes("image", make()))
    assert error.code == code


async def test_bombs_were_not_unpacked(strict: MediaIntake) -> None:
    """The process that rejected the largest of them never had memory for their pixels."""
    for name in (
        "PNG that unpacks to 25 MB",
        "JPEG that claims 4 gigapixels",
        "GIF with a frame larger than it",
    ):
        await rejection(strict, MediaSource.from_bytes("image", FILES[name][0]()))
    (process, *_) = strict.idle
    with open(f"/proc/{process.pid}/status") as file:
        (peak,) = (int(line.split()[1]) for line in file if line.startswith("VmHWM"))
    assert peak < 150_000, f"{peak} KB"


URLS = {
    "no comma": ("data:image/png;base64", "media_bad_url"),
    "no data": ("data:image/png;base64,", "media_empty"),
    "characters of no alphabet": ("data:image/png;base64,iVB*RK5C", "media_bad_base64"),
    "one character too many": ("data:image/png;base64,AAAAA", "media_bad_base64"),
    "padding in the middle": ("data:image/png;base64,AA==AAAA", "media_bad_base64"),
    "not ASCII": ("data:image/png;base64,äöüß", "media_bad_base64"),
    "lone surrogate": ("data:image/png;base64,\ud800AAA", "media_bad_base64"),
    "a type that is not the data's": (data_url(b"<svg/>", "image/png"), UNKNOWN),
    "a head without end": ("data:" + "a" * 5000 + ",AAAA", "media_bad_url"),
    "too large": ("data:image/png;base64," + "A" * 900_000, "media_too_large"),
    "too large once decoded": ("data:image/png;base64," + "A" * 400_000, "media_too_large"),
}


@pytest.mark.parametrize("attack", URLS)
async def test_a_malformed_data_url_is_rejected(strict: MediaIntake, attack: str) -> None:
    """Each with a code of its own."""
    url, code = URLS[attack]
    assert (await rejection(strict, MediaSource.from_url("image", url))).code == code


async def test_data_urls_may_be_switched_off() -> None:
    """Like every other scheme."""
    async with closing(MediaIntake(FetchPolicy(schemes=("https",)), limits=TIGHT)) as intake:
        error = await rejection(intake, MediaSource.from_url("image", data_url(PNG)))
        assert error.code == "media_scheme_not_allowed"


async def test_more_memory_than_allowed_fails_the_item() -> None:
    """100 megapixels, with a limit that lets them pass, in a process that has no room for them."""
    limits = TIGHT._replace(image=TIGHT.image._replace(pixels_max=200_000_000))
    async with closing(
        MediaIntake(settings=IntakeSettings(processes=1, memory_mib=256), limits=TIGHT)
    ) as intake:
        source = MediaSource.from_bytes("image", images.jpeg_of_size(10_000, 10_000))
        error = await rejection(intake, source, limits, kib_max=256 * 1024)
        assert error.code == "media_out_of_memory"
        assert (await intake.fetch(MediaSource.from_bytes("image", PNG))).shape == (4, 6, 3)


async def test_more_cpu_time_than_allowed_fails_the_item() -> None:
    """A progressive JPEG whose scans repeat: small, of few pixels by its header, and hours of work."""
    limits = TIGHT._replace(
        image=TIGHT.image._replace(pixels_max=20_000_000, bytes_max=8_000_000, decode_s=1)
    )
    async with closing(MediaIntake(settings=IntakeSettings(processes=1), limits=TIGHT)) as intake:
        error = await rejection(intake, MediaSource.from_bytes("image", images.scan_bomb()), limits)
        assert error.code == "media_decode_timeout"
        assert "CPU time" in str(error)
        assert (await intake.fetch(MediaSource.from_bytes("image", PNG))).shape == (4, 6, 3)
