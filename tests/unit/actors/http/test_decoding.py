"""Errors about a body name the field, and the values that it may have."""

from typing import Any, Literal

import msgspec
import pytest

from headwater.actors.http.body import decode_body
from headwater.actors.http.errors import ApiError

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


_decoder = msgspec.json.Decoder(Body)


def refused(**fields: Any) -> ApiError:
    """The error for a body of these fields, and a model unless there is one."""
    with pytest.raises(ApiError) as raised:
        decode_body(_decoder, msgspec.json.encode({"model": "m", **fields}))
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
        decode_body(_decoder, b"{}")
    assert raised.value.param == "model"
