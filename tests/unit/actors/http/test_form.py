"""Forms with files: what clients send is read, and what breaks the format or a limit is rejected by name."""

from typing import Any

import httpx
import pytest

from headwater.actors.http import body as http_body
from headwater.actors.http.body import UploadForm, read_form
from headwater.actors.http.errors import ApiError


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
