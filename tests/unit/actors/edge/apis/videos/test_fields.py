"""What a request for a video may say, as JSON or as a form: every field that is wrong is refused by its name."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from headwater.actors.edge.apis.videos import decode_video
from headwater.actors.http.errors import ApiError
from headwater.schemas.inference import VideoRequest
from tests.support.data.videos import SUPPORT
from tests.support.worlds.edge import EVERYTHING, EdgeWorld

PATH = "/v1/videos"
BODY = {"model": "films", "prompt": "a river"}
FORM = [(b"content-type", b"multipart/form-data; boundary=b")]


@pytest.fixture(scope="module")
def edge() -> Iterator[EdgeWorld]:
    """A model that generates videos, and one of text."""
    with EdgeWorld() as world:
        world.serve("films", capabilities=frozenset({"video_generation"}), video_generation=SUPPORT)
        world.serve("text", capabilities=EVERYTHING)
        yield world


def form(**fields: str) -> bytes:
    parts = [
        f'--b\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in fields.items()
    ]
    return ("".join(parts) + "--b--\r\n").encode()


async def order(**fields: Any) -> VideoRequest:
    return (await decode_video([], msgspec.json.encode(BODY | fields))).order(SUPPORT, "films")


WRONG = [
    ({"size": "1024x1024"}, "size", "sides from 64 to 256 pixels that are multiples of 8"),
    ({"size": "256x128"}, "size", "32768 pixels; films generates at most 16384"),
    ({"size": "huge"}, "size", "does not generate videos of this size"),
    ({"seconds": "11"}, "seconds", "above 0, and at most 10.125"),
    ({"seconds": "0"}, "seconds", "above 0"),
    ({"seconds": "4s"}, "seconds", "above 0"),
    ({"seconds": "-1"}, "seconds", "above 0"),
    ({"seconds": "1e3"}, "seconds", "above 0"),
    ({"steps": "101"}, "steps", "at most 100"),
    ({"priority": "high"}, "priority", "Expected `int"),
    ({"input_reference": "file_1"}, "input_reference", "from text alone"),
]


@pytest.mark.parametrize(("fields", "param", "says"), WRONG)
def test_what_is_wrong_is_refused_by_name(
    edge: EdgeWorld, fields: dict[str, str], param: str, says: str
) -> None:
    """With what is allowed instead, in either form of the body; no job is made."""
    numbers = {
        name: msgspec.json.decode(value) if name in ("steps", "seed", "guidance_scale") else value
        for name, value in fields.items()
    }
    for body, headers in ((BODY | numbers, []), (form(**BODY | fields), FORM)):
        response = edge.ask(PATH, body, headers=headers)
        assert response.status == 400, response.body
        error = response.document["error"]
        assert (error["param"], says in error["message"]) == (param, True), error
    assert edge.ask(PATH, b"", method="GET").document["data"] == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (form(**BODY, wings="2"), "wings"),
        # The fleet's own.
        (form(**BODY, handoff="2"), "handoff"),
        (form(**BODY)[:-7] + form(prompt="another"), "prompt"),
        (form(**BODY).replace(b"b--", b"b"), None),
        (form(prompt="a river"), "model"),
    ],
)
def test_a_form_that_is_wrong_is_refused(edge: EdgeWorld, body: bytes, param: str | None) -> None:
    """Unknown fields too: a form has no place for what a server ignores."""
    response = edge.ask(PATH, body, headers=FORM)
    assert (response.status, response.document["error"]["param"]) == (400, param), response.body


async def test_what_a_request_leaves_out_is_the_models_own() -> None:
    """The seed is the edge's, so that a second worker begins with the same noise."""
    made = await order()
    assert (made.width, made.height, made.frames, made.fps, made.steps) == (64, 64, 17, 8, 4)
    assert (made.guidance, made.negative_prompt, made.priority) == (None, "", 0)
    assert len({(await order()).seed for _ in range(8)}) > 1
    given = await order(size="128x64", seconds=10, steps=100, seed=5, guidance_scale=3.5, priority=-3)
    assert (given.width, given.frames, given.steps) == (128, 81, 100)
    assert (given.seed, given.guidance, given.priority) == (5, 3.5, -3)
    # The possible number of frames that is next to the duration; one is the least.
    assert [(await order(seconds=seconds)).frames for seconds in ("0.1", 1, "1.5", 2.0)] == [1, 9, 13, 17]


async def test_a_form_says_what_json_says() -> None:
    """Numbers in it are text."""
    fields = {"size": "128x64", "seconds": "2", "seed": "5", "steps": "9", "priority": "-3"}
    body = form(**{"model": "films", "prompt": "a river"} | fields)
    assert (await decode_video(FORM, body)).order(SUPPORT, "films") == await order(
        size="128x64", seconds="2", seed=5, steps=9, priority=-3
    )
    with pytest.raises(ApiError, match="valid JSON"):
        await decode_video([], b"{")


def test_each_kind_of_model_is_asked_at_its_own_endpoint(edge: EdgeWorld) -> None:
    for path, body, use in (
        (PATH, BODY | {"model": "text"}, "/v1/chat/completions"),
        ("/v1/images/generations", BODY, PATH),
        ("/v1/completions", BODY, PATH),
    ):
        error = edge.ask(path, body).document["error"]
        assert (error["param"], error["message"].endswith(f"use {use}.")) == ("model", True), error
    assert edge.ask(PATH, BODY | {"model": "nobody"}).status == 404
    document = edge.ask("/v1/models/films", b"", method="GET").document
    assert document["video_generation"]["frames_max"] == 81


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", f"{PATH}/video_0", 404, "video_not_found"),
        ("GET", f"{PATH}/video_{'0' * 32}", 404, "video_not_found"),
        ("GET", f"{PATH}/video_{'0' * 32}/content", 404, "video_not_found"),
        ("GET", f"{PATH}/video_{'0' * 32}/content?variant=thumbnail", 400, None),
        ("GET", f"{PATH}?limit=0", 400, None),
        ("DELETE", f"{PATH}/video_{'0' * 32}", 404, "video_not_found"),
        ("PUT", PATH, 405, "method_not_allowed"),
        ("POST", f"{PATH}/video_{'0' * 32}", 405, "method_not_allowed"),
        ("POST", f"{PATH}/video_{'0' * 32}/remix", 404, "not_supported"),
        ("POST", f"{PATH}/edits", 404, "not_supported"),
        ("GET", f"{PATH}/../models", 404, "video_not_found"),
        ("GET", f"{PATH}x", 404, "not_found"),
    ],
)
def test_there_is_nothing_at_other_paths(
    edge: EdgeWorld, method: str, path: str, status: int, code: str | None
) -> None:
    response = edge.ask(path, {} if method == "POST" else b"", method=method)
    assert (response.status, response.document["error"]["code"]) == (status, code), response.body
