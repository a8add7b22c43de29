"""What a request to change images may say, and how large the result is."""

import io
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from PIL import Image

from headwater.actors.edge.apis.images import VARIATIONS, EditInputs, decode_edit, fitted
from headwater.actors.http.body import UploadForm
from headwater.actors.media.item import MediaItem
from tests.support.data.pictures import SUPPORT
from tests.support.worlds.edge import EVERYTHING, EdgeWorld

PATH = "/v1/images/edits"
EDITS = msgspec.structs.replace(SUPPORT, inputs_max=2, masks=True)


def png(width: int = 64, height: int = 64) -> bytes:
    written = io.BytesIO()
    Image.new("RGB", (width, height)).save(written, "PNG")
    return written.getvalue()


def form(*images: bytes, mask: bytes | None = None, **fields: str) -> UploadForm:
    made = UploadForm()
    made.fields = {name: [value] for name, value in {"model": "edits", "prompt": "fog", **fields}.items()}
    made.files = {"image": list(images or (png(),))}
    if mask is not None:
        made.files["mask"] = [mask]
    return made


@pytest.fixture(scope="module")
def edge() -> Iterator[EdgeWorld]:
    """A model that changes images, one that takes no mask, one that only generates, and one of text."""
    with EdgeWorld() as world:
        both = frozenset({"image_generation", "image_edits"})
        world.serve("edits", capabilities=both, image_generation=EDITS)
        world.serve("whole", capabilities=both, image_generation=msgspec.structs.replace(EDITS, masks=False))
        world.serve("pictures", capabilities=frozenset({"image_generation"}), image_generation=SUPPORT)
        world.serve("only-edits", capabilities=frozenset({"image_edits"}), image_generation=EDITS)
        world.serve("text", capabilities=EVERYTHING)
        yield world


def post(edge: EdgeWorld, path: str = PATH, **parts: Any) -> tuple[int, dict[str, Any]]:
    response = edge.ask_form(path, **parts)
    return response.status, response.document["error"]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"strength": "0"}, "strength", "> 0"),
        ({"strength": "1.5"}, "strength", "<= 1"),
        ({"input_fidelity": "high"}, "input_fidelity", "not supported"),
        ({"moderation": "low"}, "moderation", "not supported"),
        ({"n": "many"}, "n", "int"),
        ({"style_of": "monet"}, "style_of", "not supported"),
        ({"handoff": "h"}, "handoff", "not supported"),
        ({"image": "x"}, "image", "uploaded file"),
        ({"model": "text"}, "model", "does not edit images; use /v1/chat/completions"),
        ({"model": "pictures"}, "model", "does not edit images; use /v1/images/generations"),
    ],
)
def test_what_is_wrong_is_refused_by_name(
    edge: EdgeWorld, fields: dict[str, str], param: str, says: str
) -> None:
    """Before anything is decoded, and before a worker sees it."""
    edge.queries.clear()
    data = {"model": "edits", "prompt": "fog", **fields}
    status, error = post(edge, data=data, files=[("image", ("a.png", png()))])
    assert (status, error["param"]) == (400, param), error
    assert says in error["message"], error
    assert edge.queries == []


@pytest.mark.parametrize(
    ("model", "files", "param", "says"),
    [
        ("edits", [], "image", "no image"),
        ("edits", ["image"] * 3, "image", "takes 2"),
        ("edits", ["image"] * 17, "image", "length <= 16"),
        ("edits", ["image", "mask", "mask"], "mask", "several masks"),
        ("whole", ["image", "mask"], "mask", "takes no mask"),
        ("edits", ["image", "sketch"], "sketch", "not expected"),
        ("edits", ["image"], "image", "decodes no media"),
    ],
)
def test_files_that_are_not_taken(
    edge: EdgeWorld, model: str, files: list[str], param: str, says: str
) -> None:
    fields: list[Any] = [("model", (None, model)), ("prompt", (None, "fog"))]
    status, error = post(edge, files=fields + [(name, ("a.png", png())) for name in files])
    assert (status, error["param"], says in error["message"]) == (400, param, True), error


def test_a_model_that_only_edits_says_so_where_images_are_generated(edge: EdgeWorld) -> None:
    """And variations name what to use."""
    body = {"model": "only-edits", "prompt": "x"}
    error = edge.ask("/v1/images/generations", body).document["error"]
    assert error["message"].endswith(f"use {PATH}.")
    status, error = post(edge, VARIATIONS, data={"model": "edits"}, files={"image": ("a.png", png())})
    assert (status, error["code"]) == (404, "not_supported")
    assert PATH in error["message"]
    assert edge.ask(PATH, b"", method="GET").status == 405


def item(width: int, height: int, channels: int = 3) -> MediaItem:
    shape = (height, width, channels)
    return MediaItem(
        "image",
        f"{width}x{height}x{channels}",
        "uint8",
        shape,
        memoryview(bytes(width * height * channels)),
        "png",
    )


def test_the_order_has_the_images_and_their_size() -> None:
    """Unless the form names one; the mask is apart."""
    made = decode_edit(form(b"1", b"2", mask=b"3", strength="0.5", seed="7"))
    inputs = EditInputs((item(64, 128), item(80, 80), item(64, 128, 1)), masked=True)
    order = inputs.complete(made.order(EDITS, "edits"), made, EDITS)
    assert [one.shape for one in order.images] == [(128, 64, 3), (80, 80, 3)]
    assert order.mask is not None
    assert order.mask.shape == (128, 64, 1)
    assert order.inputs == (*order.images, order.mask)
    assert (order.need, order.strength, order.seed) == ("image_edits", 0.5, 7)
    assert (order.width, order.height) == (64, 88)
    named = decode_edit(form(size="128x64"))
    order = EditInputs((item(64, 64),), masked=False).complete(named.order(EDITS, "edits"), named, EDITS)
    assert (order.width, order.height, order.mask, order.strength) == (128, 64, None, None)


@pytest.mark.parametrize(
    ("width", "height", "expected"),
    [
        (64, 64, (64, 64)),
        (1000, 1000, (64, 64)),
        (4000, 1000, (128, 64)),
        (1, 1, (64, 64)),
        (9000, 9, (256, 64)),
    ],
)
def test_a_result_has_the_shape_of_the_image(width: int, height: int, expected: tuple[int, int]) -> None:
    """With sides that the model has, and no more pixels than it generates unless a side would be too small."""
    assert fitted(width, height, EDITS) == expected


def test_the_log_has_no_files() -> None:
    """But their sizes."""
    logged = msgspec.json.decode(decode_edit(form(b"abc", mask=b"de")).logged)
    assert logged == {"model": "edits", "prompt": "fog", "image": ["3 bytes"], "mask": "2 bytes"}
