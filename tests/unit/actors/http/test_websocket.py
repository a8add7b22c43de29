"""WebSockets on real sockets: counted among the connections, bounded for slow clients, notified when the server stops."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from headwater.actors.http.connection import WebSocket
from headwater.actors.http.server import UvicornServer
from headwater.actors.limits import ConnectionLimits

Serve = Callable[[WebSocket], Awaitable[None]]


@contextlib.asynccontextmanager
async def serving(serve: Serve, limits: ConnectionLimits) -> AsyncIterator[tuple[UvicornServer, str]]:
    """A server that answers HTTP with 200, and WebSockets by `serve`; gives it with its address."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            accepted = WebSocket(receive, send)
            await accepted.accept([])
            await serve(accepted)
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = UvicornServer(listener.dup(), limits)
        task = asyncio.create_task(server.serve(app))
        await server.listening.wait()
        try:
            yield server, server.url.removeprefix("http://")
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            server.close()


async def echo(accepted: WebSocket) -> None:
    """Send every message back."""
    while (message := await accepted.receive()) is not None:
        accepted.send(message)


async def status(url: str) -> int:
    """Status of a request on a connection of its own."""
    async with httpx.AsyncClient() as client:
        return (await client.get(f"http://{url}")).status_code


async def test_sockets_count_as_connections_until_they_end() -> None:
    async with serving(echo, ConnectionLimits(connections=1)) as (_, url):
        async with connect(f"ws://{url}/x") as client:
            await client.send("hello")
            assert await client.recv() == "hello"
            assert await status(url) == 503
        async with asyncio.timeout(10):
            while await status(url) != 200:
                await asyncio.sleep(0.01)


async def test_an_open_socket_outlives_the_times_for_header_and_body() -> None:
    limits = ConnectionLimits(header_timeout_s=0.1, body_timeout_s=0.1)
    async with serving(echo, limits) as (_, url), connect(f"ws://{url}/x") as client:
        await asyncio.sleep(0.3)
        await client.send("hello")
        assert await client.recv() == "hello"


async def test_a_client_that_does_not_read_is_given_up() -> None:
    given_up = asyncio.Event()

    async def flood(accepted: WebSocket) -> None:
        for _ in range(4_096):
            accepted.send(b"x" * 65_536)
            await asyncio.sleep(0)
            if accepted.closed.is_set():
                given_up.set()
                return

    async with serving(flood, ConnectionLimits()) as (_, url):
        reader, writer = await asyncio.open_connection(*url.split(":"))
        writer.write(
            b"GET /x HTTP/1.1\r\nhost: a\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
            b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        await reader.readuntil(b"\r\n\r\n")
        async with asyncio.timeout(10):
            await given_up.wait()
        writer.close()


async def test_a_slow_client_gets_every_message_in_order() -> None:
    async def send_all(accepted: WebSocket) -> None:
        for number in range(60):
            accepted.send(b"%d" % number + b"x" * 50_000)
        await accepted.receive()

    async with (
        serving(send_all, ConnectionLimits()) as (_, url),
        connect(f"ws://{url}/x", max_queue=1) as client,
    ):
        await asyncio.sleep(0.05)
        for number in range(60):
            assert str(await client.recv()).rstrip("x") == str(number)


async def test_the_application_ends_what_runs_when_the_server_stops() -> None:
    async def finish_later(accepted: WebSocket) -> None:
        reading = asyncio.create_task(echo(accepted))
        assert await accepted.wait_for_drain(10.0)
        accepted.send(b"the end")
        await accepted.close(1012)
        await reading

    async with serving(finish_later, ConnectionLimits()) as (server, url), connect(f"ws://{url}/x") as client:
        server.stop()
        assert await client.recv() == "the end"
        with pytest.raises(ConnectionClosed):
            await client.recv()
        assert client.close_code == 1012
