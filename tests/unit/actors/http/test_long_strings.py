"""Bodies with long strings decode to what they say, wherever the strings are, at no cost to the event loop."""

import time
from typing import Annotated, Any

import msgspec
import pytest

from headwater.actors.http.body import (
    LARGE_BYTES,
    STRINGS_MAX,
    ShortenedBody,
    ascii_text,
    decode_body,
    joined,
    shorten,
    whole_body,
)
from headwater.actors.http.errors import ApiError

LONG = "iVBORw0KGgo+/" * (LARGE_BYTES // 13 + 1)
OTHER = "A" * LARGE_BYTES
SHARE_MAX = 0.4
"""Of what decoding the body as a whole takes the same thread."""
TRIES = 5
"""The least counts: other processes cost this one its caches, and a garbage collection may come in any try."""


class Inner(msgspec.Struct):
    """A field of several types, and one that holds anything."""

    text: str | list[str] | None = None
    anything: Any = None


class Body(msgspec.Struct):
    """Fields of every kind that a text can be in."""

    inner: Inner | None = None
    items: list[dict[str, Any]] = []
    pair: tuple[str, ...] = ()
    raw: msgspec.Raw = msgspec.Raw()
    name: Annotated[str, msgspec.Meta(max_length=32_000)] = ""


def both(body: bytes, short: bytes, kind: Any) -> tuple[Any, Any]:
    """What a body and its short form decode to."""
    decoder = msgspec.json.Decoder(kind)
    return decoder.decode(body), decode_body(decoder, short)


@pytest.mark.parametrize(
    ("value", "is_short"),
    [
        ({"inner": {"text": LONG}}, True),
        ({"inner": {"text": ["a", LONG, OTHER]}}, True),
        ({"inner": {"anything": {"a": [{"b": LONG}, {"c": LONG}]}}}, True),
        ({"items": [{"type": "image", "url": LONG}, {"type": "image", "url": OTHER}]}, True),
        ({"pair": [LONG, OTHER]}, True),
        ({"raw": {"a": LONG}}, True),
        ({"items": [{LONG: 1}]}, True),
        ({"unknown": LONG}, True),
        ({"inner": {"text": LONG + "é"}}, False),
        ({"inner": {"text": LONG + '"\\\n'}}, False),
        ({"inner": {"text": "a" * (LARGE_BYTES - 1)}}, False),
        ({"items": [{"a": "b"}] * 100_000}, False),
    ],
)
async def test_a_body_decodes_to_the_same_with_marks(value: Any, is_short: bool) -> None:
    """Also where a mark cannot be replaced: then the whole body is decoded."""
    body = msgspec.json.encode(value)
    short = await shorten(body)
    assert isinstance(short, ShortenedBody) == is_short
    assert whole_body(short) is body
    for kind in (Body, Any):
        expected, found = both(body, short, kind)
        assert found == expected


async def test_the_last_of_two_members_counts() -> None:
    """As without marks."""
    body = b'{"inner": {"text": "%s", "text": "b"}}' % LONG.encode()
    expected, found = both(body, await shorten(body), Body)
    assert found == expected == Body(inner=Inner(text="b"))


async def test_more_long_strings_than_are_looked_for() -> None:
    """The others are decoded with the rest."""
    body = msgspec.json.encode([OTHER] * (STRINGS_MAX + 2))
    expected, found = both(body, await shorten(body), list[str])
    assert found == expected


async def test_a_mark_is_too_long_where_its_text_is() -> None:
    """A limit on a field holds for what was sent."""
    short = await shorten(msgspec.json.encode({"name": LONG}))
    with pytest.raises(ApiError) as caught:
        decode_body(msgspec.json.Decoder(Body), short)
    assert (caught.value.status, caught.value.param) == (400, "name")


@pytest.mark.parametrize("end", [b"", b'"}}}', b'\x01"}}', b'\\q"}}'])
async def test_a_malformed_body_is_rejected(end: bytes) -> None:
    """Cut strings, too much after them, and what JSON does not allow in them."""
    short = await shorten(b'{"inner": {"text": "' + LONG.encode() + end)
    with pytest.raises(ApiError) as caught:
        decode_body(msgspec.json.Decoder(Body), short)
    assert caught.value.status == 400


async def test_the_event_loop_does_not_copy_long_strings() -> None:
    """What its thread computes for a body of 27 MB."""
    body = msgspec.json.encode({"inner": {"text": "A" * 27_000_000}})
    spent_s, whole_s = [], []
    for _ in range(TRIES):
        times_s = [time.thread_time()]
        found = decode_body(msgspec.json.Decoder(Body), await shorten(body))
        times_s.append(time.thread_time())
        whole = msgspec.json.decode(body, type=Body)
        times_s.append(time.thread_time())
        assert found == whole
        spent_s.append(times_s[1] - times_s[0])
        whole_s.append(times_s[2] - times_s[1])
    assert min(spent_s) < SHARE_MAX * min(whole_s), (spent_s, whole_s)


def test_copies_without_the_lock_are_whole() -> None:
    """Bytes and text, with and without what is around them; the parts are given up."""
    parts = [bytes([number]) * (LARGE_BYTES // 3) for number in range(1, 6)]
    expected = b"".join(parts)
    assert joined(parts) == expected
    assert not parts
    data = b"x" + LONG.encode() + b"y"
    text = ascii_text(data, 1, len(data) - 1)
    assert text == LONG
    assert text.isascii()
    assert hash(text) == hash(LONG)
    assert {text: 1}[LONG] == 1
