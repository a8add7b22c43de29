"""What a request for images may say: every field that is wrong is refused by its name, before a worker sees it."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from headwater.actors.edge.apis.file_types import PROMPT_CHARACTERS_MAX
from headwater.actors.edge.apis.images import ImagesRequest
from headwater.actors.http.body import decode_body
from headwater.schemas.inference import ImageRequest
from tests.support.data.pictures import SUPPORT
from tests.support.worlds.edge import EVERYTHING, EdgeWorld

PATH = "/v1/images/generations"
BODY = {"model": "pictures", "prompt": "a spring"}


@pytest.fixture(scope="module")
def edge() -> Iterator[EdgeWorld]:
    """A model that generates images, one of text, and one of vectors."""
    with EdgeWorld() as world:
        world.serve("pictures", capabilities=frozenset({"image_generation"}), image_generation=SUPPORT)
        world.serve("text", capabilities=EVERYTHING)
        world.serve("vectors", capabilities=frozenset({"embed"}), tasks=("embed",))
        yield world


def order(**fields: Any) -> ImageRequest:
    return decode_body(ImagesRequest, msgspec.json.encode(BODY | fields)).order(SUPPORT, "pictures")


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"size": "1024x1024"}, "size", "sides from 64 to 256 pixels that are multiples of 8"),
        ({"size": "65x64"}, "size", "multiples of 8"),
        ({"size": "64x32"}, "size", "sides from 64"),
        ({"size": "huge"}, "size", "WIDTHxHEIGHT"),
        ({"size": "064x064"}, "size", "WIDTHxHEIGHT"),
        ({"n": 5}, "n", "at most 4 images per request"),
        ({"n": 0}, "n", ">= 1"),
        ({"steps": 101}, "steps", "at most 100"),
        ({"prompt": ""}, "prompt", "length >= 1"),
        ({"prompt": "a" * (PROMPT_CHARACTERS_MAX + 1)}, "prompt", "length <= 32000"),
        ({"seed": -1}, "seed", ">= 0"),
        ({"guidance_scale": 101}, "guidance_scale", "<= 100"),
        ({"output_format": "gif"}, "output_format", "Invalid enum value"),
        ({"output_compression": 50}, "output_compression", "jpeg and webp"),
        ({"output_compression": 101, "output_format": "jpeg"}, "output_compression", "<= 100"),
        ({"response_format": "file"}, "response_format", "Invalid enum value"),
        ({"partial_images": 2}, "partial_images", "needs stream: true"),
        ({"progress": True}, "progress", "needs stream: true"),
        ({"partial_images": 4, "stream": True}, "partial_images", "<= 3"),
        ({"stream": True, "n": 2}, "n", "A stream has one image"),
        ({"stream": True, "response_format": "url"}, "response_format", "inline"),
        ({"background": "transparent"}, "background", "not supported"),
        ({"quality": "hd"}, "quality", "not supported"),
        ({"style": "vivid"}, "style", "not supported"),
        ({"moderation": "low"}, "moderation", "not supported"),
    ],
)
def test_what_is_wrong_is_refused_by_name(
    edge: EdgeWorld, fields: dict[str, Any], param: str, says: str
) -> None:
    """With what is allowed instead."""
    edge.queries.clear()
    response = edge.ask(PATH, BODY | fields)
    assert response.status == 400, response.body
    error = response.document["error"]
    assert (error["param"], says in error["message"]) == (param, True), error
    assert edge.queries == []


def test_each_kind_of_model_is_asked_at_its_own_endpoint(edge: EdgeWorld) -> None:
    asked = [
        (PATH, BODY | {"model": "text"}, "/v1/chat/completions"),
        (PATH, BODY | {"model": "vectors"}, "/v1/embeddings"),
        ("/v1/completions", {"model": "pictures", "prompt": "x"}, PATH),
        ("/v1/chat/completions", {"model": "pictures", "messages": [{"role": "user", "content": "x"}]}, PATH),
        ("/v1/embeddings", {"model": "pictures", "input": "x"}, PATH),
    ]
    for path, body, use in asked:
        response = edge.ask(path, body)
        assert response.status == 400, response.body
        error = response.document["error"]
        assert (error["param"], error["message"].endswith(f"use {use}.")) == ("model", True), error
    assert edge.ask(PATH, BODY | {"model": "nobody"}).status == 404


def test_what_a_request_leaves_out_is_the_models_own() -> None:
    """The seed is the edge's, so that a second worker begins with the same noise."""
    made = order()
    assert (made.width, made.height, made.steps, made.count, made.format) == (64, 64, 4, 1, "png")
    assert (made.guidance, made.previews, made.quality, made.priority) == (None, 0, 90, 0)
    assert order(size="auto").width == SUPPORT.width
    assert len({order().seed for _ in range(8)}) > 1
    given = order(
        size="256x64",
        n=4,
        steps=100,
        seed=2**63 - 1,
        guidance_scale=3.5,
        negative_prompt="fog",
        output_format="jpeg",
        output_compression=0,
        priority=-3,
        quality="auto",
        background="opaque",
    )
    assert (given.width, given.height, given.count, given.steps) == (256, 64, 4, 100)
    assert (given.seed, given.guidance, given.negative_prompt) == (2**63 - 1, 3.5, "fog")
    assert (given.format, given.quality, given.priority) == ("jpeg", 0, -3)


def test_a_model_lists_what_it_generates(edge: EdgeWorld) -> None:
    document = edge.ask("/v1/models/pictures", b"", method="GET").document
    assert document["image_generation"]["side_max"] == 256
    assert edge.ask("/v1/models/text", b"", method="GET").document["image_generation"] is None


@pytest.mark.parametrize(
    "name", ["", "img_0", "img_" + "0" * 32 + ".png", "img_" + "0" * 32 + ".exe", "../x"]
)
def test_there_is_no_image_at_other_paths(edge: EdgeWorld, name: str) -> None:
    """404, whatever is asked for; nothing but GET."""
    response = edge.ask(f"/v1/images/files/{name}", b"", method="GET")
    assert (response.status, response.document["error"]["code"]) == (404, "image_not_found")
    assert edge.ask(f"/v1/images/files/{name}", {}).status == 405
