"""The shape of a body, counted before it is decoded: what counts, what does not, and where it ends."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.actors.http.body import INLINE_BYTES, LIMITS, SMALL_BYTES, ShapeLimits, check_shape, count
from headwater.actors.http.errors import ApiError

TIGHT = ShapeLimits(containers=10, members=10, values=10, depth=10, digits=10, escapes=10, strings=20)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=6), inner, max_size=5),
    max_leaves=40,
)


def shape_of(body: bytes) -> ShapeLimits:
    """What the kernel counts."""
    return ShapeLimits(*count(np.frombuffer(body, np.uint8)))


def padded(text: str) -> bytes:
    """A body that is large enough to be looked at. Blanks count for nothing."""
    return text.encode() + b" " * SMALL_BYTES


def reference(value: Any, level: int = 0) -> tuple[int, int, int, int, int]:
    """Containers, members, commas, deepest level and strings (also names) of a decoded value."""
    if not isinstance(value, list | dict):
        return 0, 0, 0, level, int(isinstance(value, str))
    inner = [reference(one, level + 1) for one in (value.values() if isinstance(value, dict) else value)]
    commas = max(0, len(value) - 1)
    members = len(value) if isinstance(value, dict) else 0
    return (
        1 + sum(one[0] for one in inner),
        members + sum(one[1] for one in inner),
        commas + sum(one[2] for one in inner),
        max([level + 1, *(one[3] for one in inner)]),
        members + sum(one[4] for one in inner),
    )


def runs_and_escapes(body: bytes) -> tuple[int, int]:
    """The longest run of characters outside strings that are neither blanks nor punctuation, and all escapes: slowly."""
    outside: list[str] = []
    at = escapes = 0
    text = body.decode("latin-1")
    while at < len(text):
        if text[at] == '"':
            outside.append('"')
            at += 1
            while at < len(text) and text[at] != '"':
                escapes += text[at] == "\\"
                at += 2 if text[at] == "\\" else 1
        else:
            outside.append(text[at])
        at += 1
    runs = "".join(outside)
    for mark in '"{}[]:,':
        runs = runs.replace(mark, "\0")
    runs = "".join(one for one in runs if one > " " or one == "\0")
    return max(len(run) for run in runs.split("\0")), escapes


@given(json_values, st.sampled_from([None, 1, "\t"]), st.booleans())
def test_it_counts_what_a_decoder_would_make(value: Any, indent: int | str | None, ascii_only: bool) -> None:
    """Whatever stands in strings, and however the text is laid out."""
    body = json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    assert (*shape_of(body)[:4], shape_of(body).strings) == reference(value)
    assert shape_of(body)[4:6] == runs_and_escapes(body)


@given(st.binary(max_size=300))
def test_no_bytes_break_it(body: bytes) -> None:
    """What is no JSON is counted too: the decoder refuses it later."""
    found = shape_of(body)
    assert all(0 <= number <= len(body) for number in found)
    assert found.depth <= found.containers


@pytest.mark.parametrize(
    "text",
    [
        '"[[[{{{:,:,:,999999999999999999999"',
        r'"\"[[[{{{:,:,999999999999999999999"',
        r'"\\\"[[[{{{:,:,999999999999999999999"',
        '"\\u005b[[[999999999999999999999"',
    ],
)
def test_what_is_in_a_string_does_not_count(text: str) -> None:
    """Brackets, commas and digits, also behind an escaped quote."""
    assert shape_of(text.encode())[:5] == (0, 0, 0, 0, 0)


@pytest.mark.parametrize("text", [r'"\\",[[1]]', r'"a","\\\\",[[1]]'])
def test_an_escaped_backslash_does_not_hide_the_end_of_a_string(text: str) -> None:
    """What stands behind the string counts."""
    assert shape_of(text.encode()).containers == 2


@pytest.mark.parametrize(
    ("text", "over", "what"),
    [
        (",".join(["[]"] * 10), ",".join(["[]"] * 11), "10 objects and arrays"),
        ('{"a":' * 5 + "1" + "}" * 5, '{"a":1,' + ",".join(['"b":2'] * 10) + "}", "10 members of objects"),
        ("[" + ",".join(["1"] * 11) + "]", "[" + ",".join(["1"] * 12) + "]", "10 values"),
        ("[" * 10 + "]" * 10, "[" * 10 + "]" * 9 + "[" * 10, "10 objects and arrays"),
        ("[1234567890]", "[12345678901]", "10 characters in a number"),
        ('""' * 20, '""' * 21, "20 strings"),
        ('"' + r"\n" * 10 + '"', '"' + r"\n" * 10 + r'\u0041"', "10 escaped characters"),
    ],
)
async def test_a_body_at_the_limit_passes_and_one_beyond_is_refused(text: str, over: str, what: str) -> None:
    """As HTTP 400, with the limit that it breaks."""
    await check_shape(padded(text), TIGHT)
    with pytest.raises(ApiError, match=f"more than {what}") as caught:
        await check_shape(padded(over), TIGHT)
    assert caught.value.status == 400
    assert b'"body_too_complex"' in caught.value.body()


async def test_levels_are_limited() -> None:
    """Those that are open at once, not all that there are."""
    limits = TIGHT._replace(containers=1000)
    await check_shape(padded("[" * 10 + "]" * 10 + ",[" * 10 + "]" * 10), limits._replace(values=100))
    with pytest.raises(ApiError, match="more than 10 levels"):
        await check_shape(padded("[" * 11 + "]" * 11), limits)


async def test_a_small_body_is_not_looked_at() -> None:
    """Decoding it takes no time worth counting, whatever it holds."""
    await check_shape(b"[" * SMALL_BYTES, TIGHT)
    with pytest.raises(ApiError):
        await check_shape(b"[" * (SMALL_BYTES + 1), TIGHT)


async def test_a_large_body_is_counted_in_the_same_way() -> None:
    """In a thread, beyond the size that is counted in place."""
    text = ",".join(["[]"] * 11)
    with pytest.raises(ApiError, match="more than 10 objects"):
        await check_shape(text.encode() + b" " * INLINE_BYTES, TIGHT)
    await check_shape(text.encode() + b" " * INLINE_BYTES, TIGHT._replace(containers=11))


async def test_the_largest_requests_of_real_clients_pass() -> None:
    """A prompt of a million token ids, a long conversation with tools, 1,000 prompts at once, a megabyte of text."""
    bodies: list[Any] = [
        {"model": "m", "prompt": list(range(1_000_000))},
        {"model": "m", "prompt": [list(range(1_000)) for _ in range(1_000)]},
        {"model": "m", "messages": [{"role": "user", "content": "[{" * 500_000}]},
        {
            "model": "m",
            "messages": [
                {"role": "tool", "tool_call_id": str(n), "content": [{"type": "text", "text": "x" * 50}]}
                for n in range(10_000)
            ],
        },
    ]
    for body in bodies:
        await check_shape(json.dumps(body).encode())


async def test_the_body_that_stalled_an_edge_is_refused() -> None:
    """15 million lists of one token id."""
    count_of = LIMITS.containers + 1
    with pytest.raises(ApiError, match="objects and arrays"):
        await check_shape(b'{"model":"m","prompt":[' + b"[1]," * count_of + b"[1]]}")
