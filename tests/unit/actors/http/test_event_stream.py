"""Bytes of event streams."""

import json

import pytest

from headwater.actors.http.asgi import EventStream, without_separators

LINES = "one\u2028two\u2029three\u0085four Zürich 漢字"


def test_an_event_is_one_line_for_whoever_splits_lines() -> None:
    """Python's `str.splitlines` knows more ends of lines than the format of event streams."""
    data = b"data: " + json.dumps({"text": LINES}, ensure_ascii=False).encode() + b"\n\n"
    assert len(data.decode().splitlines()) == 5
    written = without_separators(data)
    [line, empty] = written.decode().splitlines()
    assert empty == ""
    assert json.loads(line.removeprefix("data: ")) == {"text": LINES}


@pytest.mark.parametrize("text", ["plain", "Zürich \u2027 \u202a \u0086"])
def test_all_else_is_as_it_was(text: str) -> None:
    assert without_separators(text.encode()) == text.encode()


async def test_each_write_of_a_stream_is_escaped() -> None:
    """Before and after the headers."""
    sent: list[bytes] = []

    async def send(message: dict[str, object]) -> None:
        if message["type"] == "http.response.body":
            body = message["body"]
            assert isinstance(body, bytes)
            sent.append(body)

    stream = EventStream(send)
    stream.write(b'data: "\xe2\x80\xa8"\n\n')
    await stream.start([])
    stream.write(b'data: "\xc2\x85"\n\n', last=True)
    assert b"".join(sent) == b'data: "\\u2028"\n\ndata: "\\u0085"\n\n'
