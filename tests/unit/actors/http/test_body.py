"""A body is what was sent, whatever parts it arrives in, and counts as in flight until it was handled; errors in it are named by their field."""

from typing import Any, Literal

import httpx
import msgspec
import pytest

from headwater.actors.http import body as http_body
from headwater.actors.http.asgi import ClientGone, Receive
from headwater.actors.http.body import (
    UNCOUNTED_BYTES,
    Bodies,
    UploadForm,
    decode_body,
    read_form,
)
from headwater.actors.http.errors import ApiError
from headwater.actors.limits import BodyLimits

LARGE = [bytes([number]) * (UNCOUNTED_BYTES - 1) for number in range(73)]
"""Parts of some megabytes, no two alike."""


def receiver(parts: list[bytes], *, whole: bool = True) -> Receive:
    """ASGI's `receive` for a body in these parts; one that is not `whole` ends with a disconnect."""
    messages: list[dict[str, Any]] = [
        {"type": "http.request", "body": part, "more_body": True} for part in parts
    ]
    if whole:
        messages[-1]["more_body"] = False
    else:
        messages.append({"type": "http.disconnect"})
    pending = iter(messages)

    async def receive() -> dict[str, Any]:
        return next(pending)

    return receive


@pytest.mark.parametrize("parts", [[b""], [b"{}"], [b"a", b"", b"bc", b"d"], LARGE])
async def test_parts_become_one_body_in_their_order(parts: list[bytes]) -> None:
    """One part, several, and many large ones."""
    bodies = Bodies()
    size = sum(map(len, parts))
    async with bodies.read({"headers": []}, receiver(list(parts))) as body:
        assert body == b"".join(parts)
        assert bodies.in_flight_bytes == (size if size > UNCOUNTED_BYTES else 0)
    assert bodies.in_flight_bytes == 0


@pytest.mark.parametrize("encoding", [b"gzip", b"br", b"GZIP, identity"])
async def test_a_compressed_body_is_rejected_by_name(encoding: bytes) -> None:
    """It is not read as JSON; `identity` is no compression."""
    scope = {"headers": [(b"content-encoding", encoding)]}
    with pytest.raises(ApiError, match="send the body uncompressed") as raised:
        async with Bodies().read(scope, receiver([b"{}"])):
            pytest.fail("there is no body")
    assert raised.value.status == 415
    async with Bodies().read({"headers": [(b"content-encoding", b"identity")]}, receiver([b"{}"])) as body:
        assert body == b"{}"


async def test_an_abandoned_body_is_in_flight_no_more() -> None:
    """The client disconnects before the end."""
    bodies = Bodies()
    with pytest.raises(ClientGone):
        async with bodies.read({"headers": []}, receiver(LARGE, whole=False)):
            pytest.fail("there is no body")
    assert bodies.in_flight_bytes == 0


@pytest.mark.parametrize(
    ("limits", "status"),
    [
        (BodyLimits(bytes_max=UNCOUNTED_BYTES), 413),
        (BodyLimits(bytes_max=2**30, in_flight_bytes_max=2 * UNCOUNTED_BYTES), 503),
    ],
)
async def test_a_body_past_a_bound_is_refused(limits: BodyLimits, status: int) -> None:
    """Of one body, and of all."""
    bodies = Bodies(limits)
    with pytest.raises(ApiError) as refused:
        async with bodies.read({"headers": []}, receiver(LARGE)):
            pytest.fail("there is no body")
    assert refused.value.status == status
    assert bodies.in_flight_bytes == 0


# JSON.

Colour = Literal["red", "green"]


class Text(msgspec.Struct, tag="text"):
    text: str = ""


class Image(msgspec.Struct, tag="image"):
    url: str
    detail: Literal["low", "high"] | None = None


class Body(msgspec.Struct):
    model: str
    colours: list[Colour] = []
    parts: list[Text | Image] | str = ""
    by_name: dict[str, Colour] = {}
    only: Literal["one"] = "one"
    number: Literal[tuple(range(99))] = 0  # type: ignore[valid-type]  # more than are shown


def refused(**fields: Any) -> ApiError:
    """The error for a body of these fields, and a model unless there is one."""
    with pytest.raises(ApiError) as raised:
        decode_body(Body, msgspec.json.encode({"model": "m", **fields}))
    return raised.value


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (
            {"colours": ["red", "blue"]},
            "colours[1]",
            "Invalid enum value: it must be one of green, red (at colours[1])",
        ),
        (
            {"by_name": {"a": "blue"}},
            "by_name[...]",
            "Invalid enum value: it must be one of green, red (at by_name[...])",
        ),
        ({"only": "two"}, "only", "Invalid enum value: it must be one (at only)"),
        (
            {"parts": [{"type": "sound"}]},
            "parts[0].type",
            "Invalid value: it must be one of text, image (at parts[0].type)",
        ),
        (
            {"parts": [{"type": "image", "url": "x", "detail": "no"}]},
            "parts[0].detail",
            "Invalid enum value: it must be one of high, low (at parts[0].detail)",
        ),
        (
            {"parts": [{"type": "image"}]},
            "parts[0].url",
            "Object missing required field `url` (at parts[0].url)",
        ),
        ({"number": 100}, "number", "Invalid enum value (at number)"),
        ({"model": 1}, "model", "Expected `str`, got `int` (at model)"),
    ],
)
def test_the_field_and_its_values_are_named(fields: dict[str, Any], param: str, message: str) -> None:
    error = refused(**fields)
    assert (error.status, error.param) == (400, param)
    assert str(error).replace(f" (at {param})", "") == message.replace(f" (at {param})", "")


def test_a_missing_field_of_the_body_is_its_param() -> None:
    """And not none: clients show it."""
    with pytest.raises(ApiError, match="missing required field `model`") as raised:
        decode_body(Body, b"{}")
    assert raised.value.param == "model"


# Forms with files.


def sent(**parts: Any) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Headers and body as a client library makes them."""
    request = httpx.Request("POST", "http://x", **parts)
    return [(name.lower(), value) for name, value in request.headers.raw], request.read()


async def read(**parts: Any) -> UploadForm:
    """What is read of it."""
    return await read_form(*sent(**parts))


async def test_fields_and_files_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists keep their order; a file may have any bytes, also those of boundaries, and is read piece by piece."""
    monkeypatch.setattr(http_body, "SLICE_BYTES", 7)
    content = bytes(range(256)) * 3 + b"\r\n--\r\n--boundary"
    found = await read(
        data={"model": "ä", "kinds[]": ["a", "b"]}, files={"file": ("x.wav", content, "audio/wav")}
    )
    assert found.fields == {"model": ["ä"], "kinds": ["a", "b"]}
    assert found.files == {"file": [content]}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"json": {"a": 1}}, "content-type must be multipart/form-data"),
        ({"files": [("a", (None, b"\xff"))]}, "'a' is not UTF-8"),
        ({"files": [("a", (None, b"1"))] * (http_body.PARTS_MAX + 1)}, "more than 64 parts"),
        (
            {"files": [("a", (None, b"1" * (http_body.FIELD_BYTES_MAX + 1)))]},
            "'a' is longer than 65536 bytes",
        ),
        ({"files": [("", ("x", b"1"))]}, "has no name"),
    ],
)
async def test_forms_beyond_limits_are_rejected(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError, match=message) as raised:
        await read(**parts)
    assert raised.value.status == 400


async def test_files_of_one_name_keep_their_order() -> None:
    """OpenAI's client names those of a list with brackets."""
    found = await read(files=[("image[]", ("x", b"1")), ("mask", ("m", b"3")), ("image[]", ("y", b"2"))])
    assert found.files == {"image": [b"1", b"2"], "mask": [b"3"]}


@pytest.mark.parametrize("cut", [0, 1, 20, -6])
async def test_a_body_that_ends_early_is_rejected(cut: int) -> None:
    """Also one without its last boundary: a part of the file may be missing."""
    headers, body = sent(files={"file": ("x", b"1234")})
    with pytest.raises(ApiError, match="not valid multipart/form-data"):
        await read_form(headers, body[:cut])
