"""Files of messages: text, PDFs and images are read, and what is none of these is rejected with its code."""

import zlib
from collections.abc import Callable

import pytest

from headwater.actors.media.intake import MediaIntake
from headwater.actors.media.request import MediaSource
from tests.support.media.documents import document, pdf, stream
from tests.support.media.images import encoded, jpeg_of_size, picture
from tests.support.media.recordings import film, recording, tone, wav
from tests.unit.actors.media.conftest import TIGHT, rejection


@pytest.mark.parametrize(
    ("data", "text", "form"),
    [
        (b"# Title\r\n\r\nBody\n", "# Title\n\nBody\n", "text"),
        ("\ufeffname,city\nZoë,Zürich\n".encode(), "name,city\nZoë,Zürich\n", "text"),
        (b'{"a": [1, 2]}', '{"a": [1, 2]}', "text"),
        (b"ID3 and OggS are also words\x0c", "ID3 and OggS are also words\x0c", "text"),
        (pdf(["First page", "", "Third"]), "First page\n\nThird", "pdf"),
    ],
    ids=["markdown", "csv", "json", "like-mp3", "pdf"],
)
async def test_a_file_becomes_its_text(strict: MediaIntake, data: bytes, text: str, form: str) -> None:
    """Whatever it is called: its bytes say what it is."""
    item = await strict.fetch(MediaSource.from_bytes("file", data))
    assert (str(item.data, "utf-8"), item.format, item.kind) == (text, form, "file")


async def test_a_file_that_is_an_image_is_that_image(strict: MediaIntake) -> None:
    """With the id that it has as an image, so that cached blocks are found."""
    data = encoded(picture(), "PNG")
    as_file = await strict.fetch(MediaSource.from_bytes("file", data))
    assert as_file == await strict.fetch(MediaSource.from_bytes("image", data))
    assert as_file.kind == "image"


def bomb() -> bytes:
    """A PDF of 60 KB whose page has millions of instructions."""
    packed = zlib.compress(b"(a) Tj " * 8_000_000, 1)
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        "<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        "<< /Type /Page /Parent 2 0 R /Contents 4 0 R /Resources << /Font << >> >> >>",
        stream(zlib.compress(packed), "/Filter [/FlateDecode /FlateDecode]"),
    ]
    return document(objects)


def loop() -> bytes:
    """A PDF whose pages contain themselves."""
    return document(["<< /Type /Catalog /Pages 2 0 R >>", "<< /Type /Pages /Kids [2 0 R 2 0 R] /Count 2 >>"])


ENCRYPTION = "/Encrypt << /Filter /Standard /V 1 /R 2 /O (o) /U (u) /P -4 >> /ID [(a) (a)]"

FILES: dict[str, tuple[Callable[[], bytes], set[str]]] = {
    "UTF-16": (lambda: "text".encode("utf-16"), {"media_unknown_type"}),
    "Latin-1": (lambda: "Zürich".encode("latin-1"), {"media_unknown_type"}),
    "text with a zero": (lambda: b"text\0more", {"media_unknown_type"}),
    "archive, as documents of offices are": (lambda: b"PK\3\4" + bytes(100), {"media_unknown_type"}),
    "program": (lambda: b"\x7fELF" + bytes(100), {"media_unknown_type"}),
    "nothing but a mark": (lambda: b"\xef\xbb\xbf", {"media_empty"}),
    "too much text": (lambda: b"a" * 50_001, {"media_too_much_text"}),
    "too much text, cut within a letter": (lambda: b"a" + "ä".encode() * 30_000, {"media_too_much_text"}),
    "too many bytes": (lambda: b"a" * 200_001, {"media_too_large"}),
    "video": (lambda: film(3), {"media_wrong_type"}),
    "sound": (lambda: wav(tone(0.1)), {"media_wrong_type"}),
    "MP3": (lambda: recording("mp3", "libmp3lame", 0.1), {"media_wrong_type"}),
    "image with too many pixels": (
        lambda: jpeg_of_size(2_000, 1_000),
        {"media_too_many_pixels"},
    ),
    "PDF with too many pages": (lambda: pdf(["x"] * 9), {"media_too_many_pages"}),
    "PDF with too much text": (lambda: pdf(["x" * 9_000] * 8), {"media_too_much_text"}),
    "PDF without text": (lambda: pdf(["", ""]), {"media_no_text"}),
    "PDF with a password": (lambda: pdf(["x"], trailer=ENCRYPTION), {"media_encrypted"}),
    "PDF cut short": (lambda: pdf(["x"])[:60], {"media_malformed"}),
    "PDF that is only a beginning": (lambda: b"%PDF-1.7\n" + bytes(3000), {"media_malformed"}),
    "PDF whose pages contain themselves": (loop, {"media_malformed", "media_no_text"}),
    "PDF with millions of instructions": (bomb, {"media_decode_timeout", "media_out_of_memory"}),
}


@pytest.mark.parametrize("attack", FILES)
async def test_a_file_is_rejected_by_its_contents(strict: MediaIntake, attack: str) -> None:
    """In bounded time and memory; the intake takes the next one."""
    make, codes = FILES[attack]
    # A page is unpacked whole: 54 MiB, and what the reader makes of it until its second is over.
    error = await rejection(strict, MediaSource.from_bytes("file", make()), kib_max=512 * 1024)
    assert error.code in codes
    assert (await strict.fetch(MediaSource.from_bytes("file", b"ok"))).shape == (2,)


async def test_text_up_to_the_limit_is_accepted(strict: MediaIntake) -> None:
    """A mark of the encoding does not count."""
    most = TIGHT.file.text_bytes_max
    item = await strict.fetch(MediaSource.from_bytes("file", b"\xef\xbb\xbf" + b"a" * most))
    assert item.shape == (most,)
