"""The edge's HTTP server on real sockets: what becomes of connections once it stops, and once it failed."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from headwater.actors.http.server import UvicornServer

HEADER = b"GET / HTTP/1.1\r\nhost: edge\r\n\r\n"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """The socket that a process keeps for all lives of its actor."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        yield one


class SlowApp:
    """Answers once it may; `asked` is set when it was asked."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.may_answer = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked.set()
        await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": b"done"})


@contextlib.asynccontextmanager
async def serving(listener: socket.socket, app: Any) -> AsyncIterator[tuple[UvicornServer, Any]]:
    """One life's server on its own copy of the socket."""
    server = UvicornServer(listener.dup())
    task = asyncio.create_task(server.serve(app))
    await server.listening.wait()
    try:
        yield server, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        server.close()


async def asked(listener: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A new connection with a request on it."""
    reader, writer = await asyncio.open_connection(*listener.getsockname()[:2])
    writer.write(HEADER)
    return reader, writer


async def until_refused(listener: socket.socket, within_s: float) -> None:
    """Wait until nobody can connect; fails after `within_s`."""
    async with asyncio.timeout(within_s):
        with contextlib.suppress(ConnectionRefusedError):
            while True:
                # One that the kernel had accepted when the server closed its socket is reset.
                with contextlib.suppress(ConnectionResetError):
                    _, writer = await asyncio.open_connection(*listener.getsockname()[:2])
                    writer.close()
                await asyncio.sleep(0.02)


async def test_a_server_that_stops_refuses_connections_while_it_answers(listener: socket.socket) -> None:
    """Nobody waits for the end of another client's answer to hear that there is no place here."""
    app = SlowApp()
    async with serving(listener, app) as (server, task):
        reader, writer = await asked(listener)
        await app.asked.wait()
        server.stop()
        await until_refused(listener, within_s=2)
        assert not task.done()
        app.may_answer.set()
        assert (await reader.read()).endswith(b"done")
        writer.close()
        await asyncio.wait_for(task, 2)


async def test_connections_wait_for_the_next_life_of_a_server_that_failed(listener: socket.socket) -> None:
    """Between two lives nobody is refused."""
    app = SlowApp()
    app.may_answer.set()
    async with serving(listener, app):
        pass
    reader, writer = await asked(listener)
    async with serving(listener, app):
        assert (await reader.readuntil(b"done")).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_a_life_after_a_stop_can_listen_again(listener: socket.socket) -> None:
    """An actor that fails while it drains is started once more, only to end in order."""
    app = SlowApp()
    app.may_answer.set()
    async with serving(listener, app) as (server, task):
        server.stop()
        await asyncio.wait_for(task, 2)
    async with serving(listener, app):
        reader, writer = await asked(listener)
        assert (await reader.readuntil(b"done")).startswith(b"HTTP/1.1 200")
        writer.close()


async def streams(scope: Any, receive: Any, send: Any) -> None:
    """An application that streams two events, or an answer of known length."""
    sized = scope["path"] == "/sized"
    headers = [(b"content-length", b"8")] if sized else []
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"one\n", "more_body": True})
    await send({"type": "http.response.body", "body": b"two\n"})


@pytest.mark.parametrize("keep", [b"", b"connection: keep-alive\r\n"])
@pytest.mark.parametrize("path", [b"/stream", b"/sized"])
async def test_clients_of_http_1_0_get_no_chunks(listener: socket.socket, path: bytes, keep: bytes) -> None:
    """As curl -0 and old proxies: a stream ends with its connection, and an answer of known length need not."""
    async with serving(listener, streams):
        reader, writer = await asyncio.open_connection(*listener.getsockname()[:2])
        writer.write(b"GET " + path + b" HTTP/1.0\r\n" + keep + b"\r\n")
        async with asyncio.timeout(10):
            head = await reader.readuntil(b"\r\n\r\n")
            body = await reader.readexactly(8)
            if path == b"/stream" or not keep:
                body += await reader.read()
                assert b"connection: close" in head
        writer.close()
    assert b"chunked" not in head
    assert body == b"one\ntwo\n"
