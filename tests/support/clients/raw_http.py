"""HTTP as bytes on a socket: for what no HTTP library would send, and for seeing exactly what comes back."""

import asyncio
import socket
import struct
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

LINE_BYTES_MAX = 64 * 1024 * 1024


class Answer(NamedTuple):
    """One response. Header names are lower-case."""

    status: int
    headers: dict[str, str]
    body: bytes

    def error(self) -> dict[str, Any]:
        """The OpenAI error object in it; fails when it is not one."""
        document = msgspec.json.decode(self.body)
        error: dict[str, Any] = document["error"]
        assert set(error) >= {"message", "type", "param", "code"}, error
        assert error["message"], error
        assert error["type"], error
        return error


class Closed(Exception):
    """The server closed the connection before a whole response came."""


class Connection:
    """One TCP connection to a server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> bool:
        """Send; False when the server has closed the connection."""
        try:
            self.writer.write(data)
            await self.writer.drain()
        except OSError:
            return False
        return not self.writer.is_closing()

    async def answer(self, within_s: float = 30.0) -> Answer:
        """The next response, without interim ones. Raises `Closed`, `TimeoutError`."""
        async with asyncio.timeout(within_s):
            try:
                while True:
                    status, headers = await self.head()
                    if status >= 200:
                        return Answer(status, headers, await self._body(headers))
            except (asyncio.IncompleteReadError, OSError) as error:
                raise Closed(str(error)) from error

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers of the next response."""
        line = await self.reader.readline()
        if not line:
            raise Closed("nothing came")
        status = int(line.split()[1])
        headers: dict[str, str] = {}
        while (line := await self.reader.readline()) not in (b"\r\n", b""):
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.strip().lower()] = value.strip()
        return status, headers

    async def _body(self, headers: dict[str, str]) -> bytes:
        if headers.get("transfer-encoding") == "chunked":
            return b"".join([chunk async for chunk in self.chunks()])
        if "content-length" in headers:
            return await self.reader.readexactly(int(headers["content-length"]))
        return await self.reader.read()

    async def chunks(self) -> AsyncIterator[bytes]:
        """The chunks of a chunked body, up to its last one."""
        while size := int((await self.reader.readuntil(b"\r\n")).strip(), 16):
            yield await self.reader.readexactly(size)
            await self.reader.readexactly(2)
        await self.reader.readuntil(b"\r\n")

    async def closed(self, within_s: float) -> bytes:
        """What still comes until the server closes the connection. Raises `TimeoutError`."""
        parts = []
        async with asyncio.timeout(within_s):
            try:
                while part := await self.reader.read(65536):
                    parts.append(part)
            except OSError:
                pass
        return b"".join(parts)

    def end_of_sending(self) -> None:
        """Half-close: nothing more comes from here."""
        self.writer.write_eof()

    def close(self) -> None:
        """Close in the ordinary way (FIN)."""
        self.writer.close()

    def reset(self) -> None:
        """Close at once (RST)."""
        sock = self.writer.get_extra_info("socket")
        if sock is not None and sock.fileno() >= 0:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


async def connect(url: str, *, source: str = "127.0.0.1") -> Connection:
    """Connect from a loopback address."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(
        parts.hostname, parts.port, local_addr=(source, 0), limit=LINE_BYTES_MAX
    )
    return Connection(reader, writer)


@asynccontextmanager
async def connection(url: str, *, source: str = "127.0.0.1") -> AsyncIterator[Connection]:
    """Connect from a loopback address, and close at the end."""
    made = await connect(url, source=source)
    try:
        yield made
    finally:
        made.close()


def request(
    body: bytes,
    path: str = "/v1/completions",
    *,
    method: str = "POST",
    headers: Iterable[tuple[str, str]] = (),
    length: str | None = None,
) -> bytes:
    """A request as bytes. `length` replaces the Content-Length, "" leaves it out."""
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", "content-type: application/json"]
    lines += [f"{name}: {value}" for name, value in headers]
    if length != "":
        lines.append(f"content-length: {length or len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


Part = bytes | memoryview


class Timed(NamedTuple):
    """A response, and seconds from the first byte sent to the last one received; `answer` None: closed without."""

    answer: Answer | None
    seconds: float


async def post_large(url: str, body: bytes, path: str, within_s: float) -> Timed:
    """POST a large body from a thread of its own, so that sending it does not delay the caller's event loop."""
    parts: list[Part] = [request(b"", path, length=str(len(body))), memoryview(body)]
    return await asyncio.to_thread(exchange, url, parts, within_s)


def exchange(url: str, parts: Iterable[Part], within_s: float, source: str = "127.0.0.1") -> Timed:
    """Send the parts as far as the server takes them, then read its response. Blocks.

    A plain socket, unlike asyncio's streams, still gives a response that came before the server closed.
    """
    at = urlsplit(url)
    began = time.monotonic()
    address = (at.hostname or "", at.port or 80)
    with socket.create_connection(address, timeout=within_s, source_address=(source, 0)) as sock:
        received = b""
        try:
            for part in parts:
                sock.sendall(part)
        except OSError:
            # A server that has seen enough answers and closes: its response may be there already.
            pass
        try:
            while part_received := sock.recv(65536):
                received += part_received
                answer = _whole(received)
                if answer is not None:
                    return Timed(answer, time.monotonic() - began)
        except OSError:
            pass
    return Timed(_whole(received), time.monotonic() - began)


def _whole(received: bytes) -> Answer | None:
    head, separator, rest = received.partition(b"\r\n\r\n")
    if not separator:
        return None
    first, *lines = head.decode("latin-1").split("\r\n")
    if int(first.split()[1]) < 200:
        return _whole(rest)
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    length = int(headers.get("content-length", "0"))
    return Answer(int(first.split()[1]), headers, rest[:length]) if len(rest) >= length else None
