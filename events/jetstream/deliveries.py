"""Fast receipt of what a stream's consumer delivers: a parser that hands it to its reader, with neither a queue nor a task between.

Of reading a log, receiving was half the time. nats-py builds an object of each message and puts it into a queue, from which a task
takes it: a reader that limits what is in transit to it needs none of that.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Protocol

from nats.protocol.parser import AWAITING_CONTROL_LINE, CRLF_SIZE, Parser

PLAIN_HEADERS: Final = b"NATS/1.0\r\n"
"""The first line of headers without a status."""

_DELIVERY: Final = re.compile(rb"H?MSG (\S+) (\d+) (\$JS\.ACK\.\S+) (?:(\d+) )?(\d+)\r\n")


class Reader(Protocol):
    """Takes a consumer's messages in order. Neither may raise: the connection would read no more."""

    def take_delivery(self, subject: str, reply: str, data: bytes, headers: Mapping[str, str] | None) -> None:
        """A message of the stream."""

    async def take_status(self, headers: Mapping[str, str]) -> None:
        """A message of the server about a pull."""


class UnparsedHeaders(Mapping[str, str]):
    """The headers of a message, parsed when one is asked for.

    Each message of a log carries the headers with which it was appended, which no reader of a log asks for.
    """

    __slots__ = ("_parse", "_parsed", "_raw")

    def __init__(self, raw: bytes, parse: Callable[[bytes], dict[str, str]]) -> None:
        self._raw = raw
        self._parse = parse
        self._parsed: dict[str, str] | None = None

    def _headers(self) -> dict[str, str]:
        if self._parsed is None:
            self._parsed = self._parse(self._raw)
        return self._parsed

    def __getitem__(self, name: str) -> str:
        return self._headers()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._headers())

    def __len__(self) -> int:
        return len(self._headers())


class DeliveryParser(Parser):
    """nats-py's parser, which need not look at deliveries to `readers`, by the number of their subscription."""

    def __init__(self, client: Any, parse_headers: Callable[[bytes], dict[str, str]]) -> None:
        super().__init__(client)
        self.readers: dict[int, Reader] = {}
        self._parse_headers = parse_headers
        self._missing = 0

    def reset(self) -> None:
        """See `Parser.reset`."""
        super().reset()
        self._missing = 0

    async def parse(self, data: bytes = b"") -> None:
        """Take what the connection received."""
        if not self.readers:
            self._missing = 0
            await super().parse(data)
            return
        buffer = self.buf
        buffer += data
        if self.state == AWAITING_CONTROL_LINE:
            self._missing -= len(data)
        else:
            # This message was begun by nats-py's parser, which would go on to parse all that is behind it.
            end = self.needed + CRLF_SIZE
            self._missing = end - len(buffer)
            if self._missing <= 0:
                rest = buffer[end:]
                del buffer[end:]
                await super().parse()
                if self.buf is not buffer:
                    # The connection was lost meanwhile.
                    return
                buffer += rest
        if self._missing <= 0 and self._hand_over():
            await super().parse()

    def _hand_over(self) -> bool:
        """Hand over the deliveries at the start of the buffer. False if it has nothing else, but perhaps a part of one."""
        buffer, readers, stats = self.buf, self.readers, self.nc.stats
        at, size = 0, len(buffer)
        self._missing = 0
        with memoryview(buffer) as view:
            while (match := _DELIVERY.match(view, at)) is not None:
                subject, number, reply, header_bytes, bytes_ = match.groups()
                reader = readers.get(int(number))
                start = match.end()
                body = start + int(header_bytes or 0)
                end = start + int(bytes_)
                if reader is None or (body > start and not buffer.startswith(PLAIN_HEADERS, start)):
                    break
                if end + CRLF_SIZE > size:
                    self._missing = end + CRLF_SIZE - size
                    break
                headers = (
                    UnparsedHeaders(bytes(view[start + len(PLAIN_HEADERS) : body]), self._parse_headers)
                    if body > start
                    else None
                )
                stats["in_msgs"] += 1
                stats["in_bytes"] += end - body
                reader.take_delivery(
                    str(subject, "utf-8"), str(reply, "utf-8"), bytes(view[body:end]), headers
                )
                at = end + CRLF_SIZE
        del buffer[:at]
        return at < size and not self._missing
