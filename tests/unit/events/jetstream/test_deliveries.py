"""Deliveries to a reader, other messages, and however the bytes of a connection are cut."""

import asyncio
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headwater.events.jetstream.deliveries import PLAIN_HEADERS, DeliveryParser

READER, OTHER = 7, 8
ACK = "$JS.ACK.stream.consumer.1.{0}.{0}.1700000000000000000.0"

Taken = tuple[str, int, str, bytes, bytes]


class Client:
    """Notes what reaches nats-py's side of a connection, and a reader."""

    def __init__(self) -> None:
        self.stats = {"in_msgs": 0, "in_bytes": 0}
        self.taken: list[Taken] = []
        self.slow: list[Taken] = []
        self.pings = 0

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        own = (subject.decode(), sid, reply.decode(), data, headers or b"")
        self.taken.append(own)
        self.slow.append(own)

    async def _process_ping(self) -> None:
        self.pings += 1

    def take_delivery(self, subject: str, reply: str, data: bytes, headers: Mapping[str, str] | None) -> None:
        """See `Reader`."""
        raw = PLAIN_HEADERS + headers["raw"].encode("latin-1") if headers is not None else b""
        self.taken.append((subject, READER, reply, data, raw))

    async def take_status(self, headers: Mapping[str, str]) -> None:
        """See `Reader`."""


def parser_of(client: Client) -> DeliveryParser:
    """A parser whose subscription `READER` has a reader."""
    parser = DeliveryParser(client, lambda raw: {"raw": raw.decode("latin-1")})
    parser.readers[READER] = client
    return parser


def wire(message: Taken) -> bytes:
    """A message as a server sends it."""
    subject, sid, reply, data, headers = message
    size = f"{len(headers)} {len(headers) + len(data)}" if headers else f"{len(data)}"
    between = f"{reply} " if reply else ""
    line = f"{'HMSG' if headers else 'MSG'} {subject} {sid} {between}{size}\r\n"
    return line.encode() + headers + data + b"\r\n"


# Bytes that look like the protocol's own are data too.
DATA = st.one_of(
    st.binary(max_size=60), st.just(b"MSG a 7 $JS.ACK.s.c.1.1.1.1.0 1\r\nx\r\n"), st.just(b"\r\n" * 9)
)
HEADERS = st.sampled_from([b"", PLAIN_HEADERS + b"Nats-Msg-Id: 1\r\n\r\n", b"NATS/1.0 503\r\n\r\n"])


@st.composite
def messages(draw: st.DrawFn) -> list[Taken | None]:
    """Messages of all kinds; None is a ping."""
    found: list[Taken | None] = []
    for number in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from(["delivery", "delivery", "delivery", "status", "other", "ping"]))
        reply = {"delivery": ACK.format(number), "status": "", "other": "_INBOX.1", "ping": ""}[kind]
        sid = OTHER if kind == "other" else READER
        found.append(None if kind == "ping" else (f"s.é{number}", sid, reply, draw(DATA), draw(HEADERS)))
    return found


@given(messages(), st.data())
def test_all_messages_arrive_in_order_however_they_are_cut(sent: list[Taken | None], data: Any) -> None:
    stream = b"".join(b"PING\r\n" if one is None else wire(one) for one in sent)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=8))
    client = Client()
    parser = parser_of(client)

    async def feed() -> None:
        edges = [0, *sorted(cuts), len(stream)]
        for start, end in pairwise(edges):
            await parser.parse(stream[start:end])

    asyncio.run(feed())
    wanted = [one for one in sent if one is not None]
    assert client.taken == wanted
    assert client.pings == sent.count(None)
    assert not parser.buf
    assert client.stats["in_msgs"] == len(wanted) - len(client.slow)


def test_deliveries_go_past_nats_py_again_after_another_message_was_cut() -> None:
    """A message that nats-py's parser has begun does not make it parse all that follow."""
    client = Client()
    parser = parser_of(client)
    other: Taken = ("a", OTHER, "", b"0123456789", b"")
    deliveries: list[Taken] = [("b", READER, ACK.format(number), b"x" * 50, b"") for number in range(40)]
    # The first piece ends within the second message.
    stream = wire(deliveries[0]) + wire(other) + b"".join(map(wire, deliveries))

    async def feed() -> None:
        for start in range(0, len(stream), 97):
            await parser.parse(stream[start : start + 97])

    asyncio.run(feed())
    assert client.taken == [deliveries[0], other, *deliveries]
    assert len(client.slow) <= 3


def test_a_reader_that_goes_in_the_middle_of_a_delivery_leaves_the_rest_readable() -> None:
    client = Client()
    parser = parser_of(client)
    delivery: Taken = ("a", READER, ACK.format(1), b"y" * 5_000, b"")
    small: Taken = ("a", READER, ACK.format(2), b"y", b"")
    other: Taken = ("b", OTHER, "", b"z", b"")

    async def feed() -> None:
        await parser.parse(wire(delivery)[:100])
        reader = parser.readers.pop(READER)
        await parser.parse(wire(delivery)[100:] + wire(other))
        parser.readers[READER] = reader
        await parser.parse(wire(small))

    asyncio.run(feed())
    assert client.taken == [delivery, other, small]
    assert client.slow == [delivery, other]
