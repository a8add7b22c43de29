"""HTTP without sockets: an edge's application is called directly, by clients that may disconnect or be disconnected."""

import asyncio
from contextvars import Context, copy_context
from typing import Any

from headwater.actors.http.asgi import Asgi
from headwater.ops.sim.loop import VirtualLoop
from headwater.ops.sim.network import Network


class Reset(Exception):
    """The connection was reset: the edge ended."""


class SimConnection:
    """One request's connection: its client side and its server side."""

    def __init__(self, path: str, body: bytes, network: Network, loop: VirtualLoop) -> None:
        self.path = path
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.ended = False
        self._body: list[bytes] = [body]
        self._network = network
        self._loop = loop
        self._hung_up = asyncio.Event()
        self._arrived: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._arrives_at = 0.0

    async def receive(self) -> dict[str, Any]:
        """ASGI: the body, then the client's disconnect."""
        if self._body:
            return {"type": "http.request", "body": self._body.pop(), "more_body": False}
        await self._hung_up.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        """ASGI: the response, delivered to the client in order."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = dict(message["headers"])
            return
        self._arrives_at = max(self._arrives_at, self._loop.time() + self._network.latency_s())
        self._loop.later(self._arrives_at - self._loop.time(), self._arrive, message)

    def _arrive(self, message: dict[str, Any]) -> None:
        if self.ended:
            return
        if message["body"]:
            self._arrived.put_nowait(message["body"])
        if not message.get("more_body"):
            self.ended = True
            self._arrived.put_nowait(None)

    def reset(self) -> None:
        """The server closes the connection."""
        if not self.ended:
            self.ended = True
            self.status = -1
            self._arrived.put_nowait(None)

    def hang_up(self) -> None:
        """The client disconnects."""
        self._hung_up.set()

    async def part(self) -> bytes | None:
        """The next part of the body, None at its end. Raises `Reset`."""
        part = await self._arrived.get()
        if part is None and self.status == -1:
            raise Reset
        return part


class SimHttpServer:
    """See `headwater.actors.http.server.HttpServer`. `connect` is the clients' side."""

    def __init__(self, network: Network, loop: VirtualLoop, name: str) -> None:
        self.url = f"sim://{name}"
        self.listening = asyncio.Event()
        self._network = network
        self._loop = loop
        self._app: Asgi | None = None
        self._context: Context | None = None
        self._stopped = asyncio.Event()
        self._open: dict[asyncio.Task[None], SimConnection] = {}

    async def serve(self, app: Asgi) -> None:
        """See `HttpServer.serve`."""
        self._app, self._context = app, copy_context()
        self.listening.set()
        await self._stopped.wait()
        self._app = None
        if self._open:
            await asyncio.wait(list(self._open))

    def stop(self) -> None:
        """See `HttpServer.stop`."""
        self._stopped.set()

    def close(self) -> None:
        """See `HttpServer.close`."""
        self.kill()

    def kill(self) -> None:
        """Refuse and reset all connections, as the kernel does for a process that ended."""
        self._app = None
        for connection in self._open.values():
            connection.reset()

    def connect(
        self, path: str, body: bytes, headers: list[tuple[bytes, bytes]], method: str = ""
    ) -> SimConnection:
        """Send a request; without a `method`: a POST if there is a body. Raises `Reset` without a listening server."""
        if self._app is None:
            raise Reset
        connection = SimConnection(path, body, self._network, self._loop)
        bare, _, query = path.partition("?")
        method = method or ("POST" if body else "GET")
        scope = {
            "type": "http",
            "path": bare,
            "query_string": query.encode(),
            "method": method,
            "headers": headers,
        }
        task = self._loop.create_task(
            self._app(scope, connection.receive, connection.send), name=f"http {path}", context=self._context
        )
        self._open[task] = connection
        task.add_done_callback(self._forget, context=Context())
        return connection

    def _forget(self, task: asyncio.Task[None]) -> None:
        connection = self._open.pop(task)
        if task.cancelled() or task.exception() is not None:
            connection.reset()
