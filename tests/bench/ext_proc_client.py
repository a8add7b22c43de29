"""A client of external processing that costs little: HTTP/2 frames that are made once, on one connection.

gRPC's own client for Python takes as much CPU for a request as the picker does, so on two cores it would measure itself. What gateways
send is checked with gRPC's client and with Envoy (`tests/gateway`); this one only loads.
"""

import asyncio
import struct
import time
from collections import deque
from typing import Final

from headwater.actors.picker import messages as ext_proc

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _END_HEADERS, _ACK = 0x1, 0x4, 0x1
_INITIAL_WINDOW: Final = 4
_WINDOW_BYTES: Final = 1 << 30
_RENEW_BYTES: Final = 1 << 28


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _literal(name: bytes, value: bytes) -> bytes:
    """A header that no table keeps (RFC 7541, 6.2.2). Names and values are shorter than 127 bytes."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


_HEADER_BLOCK: Final = b"".join(
    _literal(name, value)
    for name, value in (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", f"/{ext_proc.SERVICE}/{ext_proc.METHOD}".encode()),
        (b":authority", b"picker"),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
    )
)


def framed(message: bytes) -> bytes:
    """A message as gRPC frames it, uncompressed."""
    return struct.pack(">BI", 0, len(message)) + message


class _Call:
    """One request: `first` was sent, `second` follows the answer to it."""

    __slots__ = ("answers", "data", "done", "known_s", "second")

    def __init__(self, second: bytes, done: asyncio.Future[tuple[float, bytes]]) -> None:
        self.second, self.done = second, done
        self.data = b""
        self.known_s = 0.0
        self.answers = 0


class Connection(asyncio.Protocol):
    """One connection of a gateway. `pick` may be called any number of times at once."""

    def __init__(self) -> None:
        self._calls: dict[int, _Call] = {}
        self._buffer = b""
        self._next = 1
        self._window = 65_535
        self._unsent: deque[bytes] = deque()
        self._received = 0
        self._lost: str = ""

    @classmethod
    async def open(cls, host: str, port: int) -> "Connection":
        """Connect. Raises `OSError`."""
        _, made = await asyncio.get_running_loop().create_connection(cls, host, port)
        return made

    def close(self) -> None:
        """Close it."""
        self._transport.close()

    def pick(self, first: bytes, second: bytes) -> "asyncio.Future[tuple[float, bytes]]":
        """Send two framed messages, the second after the answer to the first, then end the stream as Envoy does when its client leaves.

        The result: when the second answer was there (`perf_counter`), and that answer.
        """
        done: asyncio.Future[tuple[float, bytes]] = asyncio.get_running_loop().create_future()
        if self._lost:
            done.set_exception(ConnectionError(self._lost))
            return done
        stream, self._next = self._next, self._next + 2
        self._calls[stream] = _Call(second, done)
        self._transport.write(_frame(_HEADERS, _END_HEADERS, stream, _HEADER_BLOCK))
        self._send(_frame(_DATA, 0, stream, first))
        return done

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        settings = struct.pack(">HI", _INITIAL_WINDOW, 1 << 20)
        transport.write(_PREFACE + _frame(_SETTINGS, 0, 0, settings))
        transport.write(_frame(_WINDOW, 0, 0, struct.pack(">I", _WINDOW_BYTES)))

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._fail(f"the connection was lost: {exc}")

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        buffer, at = self._buffer + data, 0
        while len(buffer) - at >= 9:
            size = int.from_bytes(buffer[at : at + 3], "big")
            if len(buffer) - at < 9 + size:
                break
            kind, flags = buffer[at + 3], buffer[at + 4]
            stream = int.from_bytes(buffer[at + 5 : at + 9], "big")
            self._take(kind, flags, stream, buffer[at + 9 : at + 9 + size])
            at += 9 + size
        self._buffer = buffer[at:]

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _DATA:
            self._take_data(stream, payload)
        elif kind == _SETTINGS and not flags & _ACK:
            self._transport.write(_frame(_SETTINGS, _ACK, 0))
        elif kind == _PING and not flags & _ACK:
            self._transport.write(_frame(_PING, _ACK, 0, payload))
        elif kind == _WINDOW and stream == 0:
            self._window += int.from_bytes(payload, "big")
            self._send()
        elif kind == _RST:
            self._calls.pop(stream).done.set_exception(ConnectionError("the stream was reset"))
        elif kind == _GOAWAY:
            self._fail(f"the server goes away: {payload[8:]!r}")
        if kind == _HEADERS and flags & _END_STREAM:
            call = self._calls.pop(stream)
            if call.answers == 2:
                call.done.set_result((call.known_s, call.data))
            else:
                call.done.set_exception(ConnectionError(f"the stream ended after {call.answers} answers"))

    def _take_data(self, stream: int, payload: bytes) -> None:
        self._received += len(payload)
        if self._received > _RENEW_BYTES:
            self._transport.write(_frame(_WINDOW, 0, 0, struct.pack(">I", self._received)))
            self._received = 0
        call = self._calls[stream]
        call.data += payload
        if len(call.data) < 5 or len(call.data) < 5 + int.from_bytes(call.data[1:5], "big"):
            return
        call.answers += 1
        if call.answers == 1:
            call.data = b""
            self._send(_frame(_DATA, 0, stream, call.second))
            return
        call.known_s = time.perf_counter()
        call.data = call.data[5:]
        self._transport.write(_frame(_DATA, _END_STREAM, stream))

    def _send(self, *frames: bytes) -> None:
        """Send data as the server's window allows; a stream's own is never reached."""
        self._unsent.extend(frames)
        while self._unsent and len(self._unsent[0]) - 9 <= self._window:
            frame = self._unsent.popleft()
            self._window -= len(frame) - 9
            self._transport.write(frame)

    def _fail(self, reason: str) -> None:
        self._lost = self._lost or reason
        for call in self._calls.values():
            if not call.done.done():
                call.done.set_exception(ConnectionError(reason))
        self._calls.clear()
