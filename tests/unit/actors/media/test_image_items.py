"""Images that are right: their pixels, and their ids."""

import asyncio
import base64
import io
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from PIL import Image, ImageOps

from headwater.actors.http.errors import ApiError
from headwater.actors.media.intake import MediaIntake
from headwater.actors.media.item import MediaItem, media_id
from headwater.actors.media.request import FetchPolicy, IntakeSettings, MediaSource, MediaTarget
from tests.support.media.images import chunk, encoded, picture
from tests.support.media.internet import Internet
from tests.unit.actors.media.conftest import HOST, closing

PICTURE = picture()
PNG = encoded(PICTURE, "PNG")
TEXT = base64.b64encode(PNG).decode()
UUID = "00000000-1111-2222-3333-444444444444"


async def item_of(intake: MediaIntake, data: bytes, processor: str = "") -> MediaItem:
    """The item of a file."""
    return await intake.fetch(MediaSource.from_bytes("image", data), target=MediaTarget(processor))


def opened(data: bytes) -> Image.Image:
    """A file as the library opens it."""
    return Image.open(io.BytesIO(data))


def pixels(image: Image.Image) -> list[list[list[int]]]:
    """What an item's array should be."""
    found: list[list[list[int]]] = np.asarray(image.convert("RGB")).tolist()
    return found


async def test_a_mask_is_what_is_transparent(strict: MediaIntake) -> None:
    """One byte per pixel; a file without transparency is no mask, and the same file as an image is another item."""
    clear = Image.new("RGBA", (3, 2), (9, 9, 9, 255))
    clear.putpixel((2, 0), (9, 9, 9, 0))
    clear.putpixel((0, 1), (9, 9, 9, 100))
    data = encoded(clear, "PNG")
    item = await strict.fetch(MediaSource.from_bytes("image", data), target=MediaTarget(mask=True))
    assert (item.shape, item.array()[:, :, 0].tolist()) == ((2, 3, 1), [[0, 0, 255], [155, 0, 0]])
    assert item.id != (await item_of(strict, data)).id
    with pytest.raises(ApiError, match="no transparency") as raised:
        await strict.fetch(MediaSource.from_bytes("image", PNG, "mask"), target=MediaTarget(mask=True))
    assert (raised.value.status, raised.value.param) == (400, "mask")


@pytest.mark.parametrize("form", ["PNG", "WEBP", "JPEG", "GIF"])
async def test_a_file_is_decoded_as_its_library_decodes_it(strict: MediaIntake, form: str) -> None:
    """Height, width, RGB."""
    data = encoded(PICTURE, form, **({"lossless": True} if form == "WEBP" else {}))
    item = await item_of(strict, data)
    assert item.array().tolist() == pixels(opened(data))
    assert (item.kind, item.dtype, item.shape, item.format) == ("image", "uint8", (4, 6, 3), form.lower())
    assert (item.width, item.height) == (6, 4)
    assert not item.array().flags.writeable


@pytest.mark.parametrize(
    ("mode", "colour", "expected"),
    [
        ("RGBA", (200, 100, 0, 0), (255, 255, 255)),
        ("RGBA", (200, 100, 0, 255), (200, 100, 0)),
        ("RGBA", (200, 100, 0, 51), (244, 224, 204)),
        ("LA", (10, 0), (255, 255, 255)),
        ("L", 77, (77, 77, 77)),
        ("1", 1, (255, 255, 255)),
        ("P", 0, (0, 0, 0)),
        ("I;16", 0x8000, (128, 128, 128)),
    ],
)
async def test_every_mode_becomes_rgb_over_white(
    strict: MediaIntake, mode: str, colour: object, expected: tuple[int, ...]
) -> None:
    """8 bits a channel."""
    item = await item_of(strict, encoded(Image.new(mode, (2, 2), colour), "PNG"))  # type: ignore[arg-type]
    assert item.array()[0, 0].tolist() == list(expected)


async def test_an_image_of_several_bands_is_whole(strict: MediaIntake) -> None:
    """More rows than are converted at once."""
    tall = Image.frombytes("L", (3, 700), bytes(n % 251 for n in range(2100)))
    assert (await item_of(strict, encoded(tall, "PNG"))).array().tolist() == pixels(tall)


@pytest.mark.parametrize("orientation", range(1, 9))
async def test_an_image_is_turned_as_its_exif_says(strict: MediaIntake, orientation: int) -> None:
    """Eight ways, as cameras are held; the same pixels as an upright file, so the same id."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    turned = await item_of(strict, encoded(PICTURE, "PNG", exif=exif))
    expected = ImageOps.exif_transpose(opened(encoded(PICTURE, "PNG", exif=exif)))
    assert turned.array().tolist() == pixels(expected)
    assert turned.id == (await item_of(strict, encoded(expected.convert("RGB"), "PNG"))).id


async def test_of_an_animation_the_first_frame_is_decoded(strict: MediaIntake) -> None:
    """However many there are."""
    frames = [Image.new("RGB", (5, 5), (n % 256, 0, 0)) for n in range(300)]
    for form in ("GIF", "WEBP", "PNG"):
        options = {"lossless": True} if form == "WEBP" else {}
        data = encoded(frames[7], form, save_all=True, append_images=frames[8:], **options)
        item = await item_of(strict, data)
        assert item.array().tolist() == pixels(frames[7]), form


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{TEXT}",
        f"DATA:IMAGE/PNG;BASE64,{TEXT}",
        f"data:;base64,{TEXT}",
        f"data:text/html;charset=utf-8;base64,{TEXT}",
        f"data:image/png;base64,{TEXT.rstrip('=')}",
        f"data:image/png;base64,{TEXT[:20]}\r\n {TEXT[20:]}\n",
        f"data:image/png;base64,{quote(TEXT, safe='')}",
        f"data:image/png;base64,{base64.urlsafe_b64encode(PNG).decode()}",
        f"data:image/png,{quote(PNG)}",
    ],
    ids=[
        "usual",
        "upper case",
        "no type",
        "parameters",
        "no padding",
        "lines",
        "percent",
        "URL alphabet",
        "plain",
    ],
)
async def test_every_form_of_a_data_url_is_the_same_image(strict: MediaIntake, url: str) -> None:
    """As browsers read them."""
    item = await strict.fetch(MediaSource.from_url("image", url))
    assert item.id == (await item_of(strict, PNG)).id


async def test_a_source_does_not_change_the_id(
    strict: MediaIntake, wide: MediaIntake, net: Internet, files: Path
) -> None:
    """A URL, a redirect, a file, base64, another format, other metadata: equal pixels have equal ids."""
    net.serve("/a.png", PNG, "Content-Type: text/html")
    net.redirect("/moved", "a.png")
    net.raw(
        "/chunked",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(PNG), PNG),
    )
    net.raw("/close", b"HTTP/1.1 200 OK\r\n\r\n" + PNG)
    (files / "a b.png").write_bytes(PNG)
    exif = Image.Exif()
    exif[0xA420] = UUID
    expected = (await item_of(strict, PNG)).id
    assert len(expected) == 32
    for source in (
        MediaSource.from_url("image", f"https://{HOST}/a.png"),
        MediaSource.from_url("image", f"HTTPS://{HOST.upper()}:443/a.png?q=1#f"),
        MediaSource.from_url("image", f"https://{HOST}/moved"),
        MediaSource.from_url("image", f"https://{HOST}/chunked"),
        MediaSource.from_url("image", f"https://{HOST}/close"),
        MediaSource.from_base64("image", TEXT),
        MediaSource.from_base64("image", TEXT.encode()),
        MediaSource.from_bytes("image", memoryview(encoded(PICTURE, "PNG", compress_level=0))),
        MediaSource.from_bytes("image", encoded(PICTURE, "WEBP", lossless=True)),
        MediaSource.from_bytes("image", encoded(PICTURE, "PNG", exif=exif)),
        MediaSource.from_bytes("image", PNG[:33] + chunk(b"tEXt", b"uuid\0" + UUID.encode()) + PNG[33:]),
    ):
        assert (await strict.fetch(source)).id == expected
    net.name("b.cdn.example", ["93.184.216.34"])
    for url in (f"file://{files}/a%20b.png", f"http://{HOST}:8080/a.png", "http://b.cdn.example/a.png"):
        assert (await wide.fetch(MediaSource.from_url("image", url))).id == expected


async def test_what_a_model_sees_changes_the_id(strict: MediaIntake) -> None:
    """A pixel, the size, the processor's settings; one EXIF id for two images is two ids."""
    exif = Image.Exif()
    exif[0xA420] = UUID
    other = PICTURE.copy()
    other.putpixel((3, 2), (1, 2, 3))
    ids = [
        (await item_of(strict, encoded(PICTURE, "PNG", exif=exif))).id,
        (await item_of(strict, encoded(other, "PNG", exif=exif))).id,
        (await item_of(strict, encoded(picture(4, 6), "PNG"))).id,
        (await item_of(strict, PNG, "min_pixels=4")).id,
        (await item_of(strict, PNG, "min_pixels=5")).id,
    ]
    assert len(set(ids)) == len(ids)


def test_no_part_of_an_id_runs_into_another() -> None:
    """Kind, type, shape, settings and values are kept apart."""
    ids = [
        media_id("image", "uint8", (1, 2, 3), b"abcdef", ""),
        media_id("image", "uint8", (2, 1, 3), b"abcdef", ""),
        media_id("video", "uint8", (1, 2, 3), b"abcdef", ""),
        media_id("image", "F32", (1, 2, 3), b"abcdef", ""),
        media_id("image", "uint8", (1, 2, 3), b"bcdef", "a"),
        media_id("image", "uint8", (1, 2, 3), b"abcdef", "a"),
    ]
    assert len(set(ids)) == len(ids)


async def test_the_id_is_stable(strict: MediaIntake) -> None:
    """Caches outlive releases; a change of this value empties them all."""
    assert (await item_of(strict, PNG)).id == "3692e05d0c11b60f70da7edc61c06fc8"


@pytest.fixture
async def many(net: Internet) -> AsyncIterator[MediaIntake]:
    """An intake of two processes."""
    intake = MediaIntake(FetchPolicy(), IntakeSettings(processes=2), program=net.program)
    yield intake
    await intake.close()


async def test_items_at_once_do_not_mix(many: MediaIntake) -> None:
    """Twenty images on two processes, which are started once each."""
    colours = [Image.new("RGB", (3, 3), (n, n, n)) for n in range(20)]
    items = await asyncio.gather(*(item_of(many, encoded(one, "PNG")) for one in colours))
    assert [int(item.array()[0, 0, 0]) for item in items] == list(range(20))
    assert len(many.pids) == len(many.idle) == 2


async def test_the_items_in_use_have_a_limit(net: Internet) -> None:
    """Beyond it a request gets a 503; the room of an item that is dropped is there again."""
    gray = encoded(Image.new("L", (3000, 4000)), "PNG")
    async with closing(
        MediaIntake(settings=IntakeSettings(processes=1, decoded_mib=64), program=net.program)
    ) as intake:
        held = await item_of(intake, gray)
        with pytest.raises(ApiError) as caught:
            await item_of(intake, gray)
        assert (caught.value.status, caught.value.code) == (503, "media_busy")
        part = held.array()[0]
        del held
        with pytest.raises(ApiError):
            await item_of(intake, gray)
        del part
        assert (await item_of(intake, gray)).shape == (4000, 3000, 3)
