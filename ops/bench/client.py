"""A minimal HTTP client on raw sockets, so that the load generator does not limit the measurement."""

import asyncio
import time
from typing import NamedTuple

END = b"0\r\n\r\n"


class Done(NamedTuple):
    """One finished request: seconds to its first and last byte, and the bytes received."""

    first_s: float
    total_s: float
    body: bytes


class BenchConnection:
    """One keep-alive connection, one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: str = "") -> None:
        self._reader = reader
        self._writer = writer
        self._key = f"authorization: Bearer {key}\r\n" if key else ""

    @classmethod
    async def open(cls, host: str, port: int, key: str = "") -> "BenchConnection":
        """Connect. Each request carries the API key."""
        return cls(*await asyncio.open_connection(host, port, limit=1 << 20), key)

    async def post(self, path: str, body: bytes) -> Done:
        """Send a request and read the whole response. Raises RuntimeError for any status except 200."""
        began = time.perf_counter()
        head = f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-length: {len(body)}\r\n{self._key}\r\n"
        self._writer.write(head.encode() + body)
        headers = await self._reader.readuntil(b"\r\n\r\n")
        first_s = time.perf_counter() - began
        lower = headers.lower()
        if b" 200 " not in headers.split(b"\r\n", 1)[0]:
            raise RuntimeError(headers.decode())
        if b"content-length: " in lower:
            length = int(lower.split(b"content-length: ", 1)[1].split(b"\r\n", 1)[0])
            data = await self._reader.readexactly(length)
        else:
            data = b""
            while not data.endswith(END):
                piece = await self._reader.read(1 << 18)
                if not piece:
                    raise RuntimeError("the stream was truncated")
                data += piece
        return Done(first_s, time.perf_counter() - began, data)

    def close(self) -> None:
        """Close."""
        self._writer.close()
