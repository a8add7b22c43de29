"""WebSockets: uvicorn's protocol over wsproto, and one connection as the application sees it.

ping           every `PING_S`; a client that does not answer in time is disconnected
messages       text only, of a limited size
slow clients   a bounded queue, then they are disconnected
drain          the application is notified, ends what runs, and closes
"""

import asyncio
from collections import Counter, deque
from typing import Any, Final

from uvicorn.protocols.websockets.wsproto_impl import WSProtocol

from headwater.actors.http.asgi import BACKLOG_BYTES_MAX, Headers, Receive, Send
from headwater.actors.http.errors import ApiError

PING_S: Final = 20.0
PONG_S: Final = 20.0

UNSUPPORTED: Final = 1003


class WebSocketConnection(WSProtocol):
    """uvicorn's, counted among the connections of a server, and without an abrupt end when the server stops."""

    addresses: Counter[str]

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop counting it."""
        address = self.client[0] if self.client else "local"
        self.addresses[address] -= 1
        if not self.addresses[address]:
            del self.addresses[address]
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Notify the application that the server stops; it closes the connection."""
        if self.handshake_complete and not self.close_sent:
            self.queue.put_nowait({"type": "headwater.drain"})  # type: ignore[typeddict-item]  # an event of our own
        else:
            super().shutdown()


async def refuse(send: Send, error: ApiError) -> None:
    """Refuse a handshake with an HTTP error."""
    body = error.body()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "websocket.http.response.start", "status": error.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": body})


class WebSocket:
    """One accepted connection. `closed` is set when nothing can be sent any more."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._sender: asyncio.Task[None] | None = None
        self._draining = asyncio.Event()
        self.closed = asyncio.Event()

    async def accept(self, headers: Headers) -> None:
        """Complete the handshake."""
        await self._receive()
        await self._send({"type": "websocket.accept", "headers": headers})

    async def receive(self) -> bytes | None:
        """The next text message, None once the connection is closed."""
        while True:
            message = await self._receive()
            match message["type"]:
                case "headwater.drain":
                    self._draining.set()
                case "websocket.receive" if message.get("text") is not None:
                    return str(message["text"]).encode()
                case "websocket.receive":
                    await self.close(UNSUPPORTED)
                case _:
                    self.closed.set()
                    return None

    async def wait_for_drain(self, most_s: float) -> bool:
        """Wait until the server stops; False if it has not after `most_s` seconds."""
        try:
            async with asyncio.timeout(most_s):
                await self._draining.wait()
        except TimeoutError:
            return False
        return True

    def send(self, message: bytes) -> None:
        """Send a text message now, or as soon as the client reads."""
        if self.closed.is_set():
            return
        if self._sender is None:
            step: Any = self._send({"type": "websocket.send", "text": message.decode()})
            try:
                step.send(None)
            except StopIteration:
                return
            except Exception:
                # The connection is gone, which `receive` reports.
                self.closed.set()
                return
            # The transport is full and nothing was written: continue in a task, in the same order.
            step.close()
            self._sender = asyncio.create_task(self._drain(), name="slow websocket client")
        self._queue.append(message)
        self._queued_bytes += len(message)
        if self._queued_bytes > BACKLOG_BYTES_MAX:
            self.closed.set()

    async def _drain(self) -> None:
        try:
            while self._queue and not self.closed.is_set():
                message = self._queue.popleft()
                self._queued_bytes -= len(message)
                await self._send({"type": "websocket.send", "text": message.decode()})
        except Exception:
            self.closed.set()
        finally:
            self._sender = None

    async def close(self, code: int) -> None:
        """Send what is queued, then close."""
        if self._sender is not None:
            await asyncio.wait({self._sender})
        if not self.closed.is_set():
            self.closed.set()
            await self._send({"type": "websocket.close", "code": code})
