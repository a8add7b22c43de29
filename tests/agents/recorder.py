"""A proxy before a fleet: it keeps what an agent sends and what is answered, and can refuse requests."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web

GENERATION = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
SOCKET = "websocket"
REFUSED = "refused by the recorder"
HOP_BY_HOP = {"host", "content-length", "transfer-encoding", "connection", "accept-encoding"}


class Exchange(NamedTuple):
    """One request, or one message of a WebSocket. `answer` is the text of an error; of streams it is empty."""

    path: str
    headers: dict[str, str]
    body: Any
    status: int
    answer: str = ""


class Recorder:
    """See the module.

    `refusals`: statuses with which the next requests for an answer are refused, in their order. `before`: what is done before the
    request for an answer with this number, from 1, is passed on. `awaited`: a text in a stream that sets `seen`.
    """

    def __init__(self, upstream: str) -> None:
        self.url = ""
        self.exchanges: list[Exchange] = []
        self.refusals: list[int] = []
        self.before: dict[int, Callable[[], object]] = {}
        self.awaited = b""
        self.seen = asyncio.Event()
        self._upstream = upstream
        self._session: aiohttp.ClientSession | None = None

    @property
    def generated(self) -> list[Exchange]:
        """The requests for an answer."""
        return [one for one in self.exchanges if one.path in (*GENERATION, SOCKET)]

    @property
    def refused(self) -> list[tuple[str, int, str]]:
        """Requests for an answer that the fleet refused."""
        return [
            (one.path, one.status, one.answer) for one in self.generated if one.answer not in ("", REFUSED)
        ]

    def summary(self) -> str:
        """Paths and statuses, for a failed test's message."""
        return "\n".join(f"{one.status} {one.path} {one.answer[:300]}" for one in self.exchanges)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Pass on one request."""
        if request.headers.get("upgrade", "").lower() == "websocket":
            return await self._socket(request)
        sent = await request.read()
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
        body = _decoded(sent)
        if request.path in GENERATION and self.refusals:
            status = self.refusals.pop(0)
            self.exchanges.append(Exchange(request.path, headers, body, status, REFUSED))
            return _refusal(request.path, status)
        if request.path in GENERATION and (act := self.before.pop(len(self.generated) + 1, None)):
            act()
        assert self._session is not None
        async with self._session.request(
            request.method, self._upstream + request.raw_path, data=sent, headers=headers
        ) as answer:
            return await self._relay(request, headers, body, answer)

    async def _relay(
        self, request: web.Request, headers: dict[str, str], body: Any, answer: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        text = "" if answer.status < 400 else await answer.text()
        self.exchanges.append(Exchange(request.path, headers, body, answer.status, text))
        response = web.StreamResponse(status=answer.status)
        for name, value in answer.headers.items():
            if name.lower() not in HOP_BY_HOP:
                response.headers[name] = value
        await response.prepare(request)
        if text:
            await response.write(text.encode())
        else:
            async for piece in answer.content.iter_any():
                await response.write(piece)
                if self.awaited and self.awaited in piece:
                    self.seen.set()
        await response.write_eof()
        return response

    async def _socket(self, request: web.Request) -> web.WebSocketResponse:
        headers = {
            name: value
            for name, value in request.headers.items()
            if name.lower() not in HOP_BY_HOP | {"upgrade"} and not name.lower().startswith("sec-websocket")
        }
        agent = web.WebSocketResponse(max_msg_size=0)
        await agent.prepare(request)
        assert self._session is not None
        async with self._session.ws_connect(
            self._upstream + request.raw_path, headers=headers, max_msg_size=0
        ) as fleet:
            self.exchanges.append(Exchange(SOCKET, headers, None, 101))
            answers = asyncio.create_task(self._answers(fleet, agent, headers))
            async for message in agent:
                self.exchanges.append(Exchange(SOCKET, headers, _decoded(message.data), 0))
                await fleet.send_str(message.data)
            answers.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await answers
        return agent

    async def _answers(
        self, fleet: aiohttp.ClientWebSocketResponse, agent: web.WebSocketResponse, headers: dict[str, str]
    ) -> None:
        async for message in fleet:
            document = _decoded(message.data)
            if isinstance(document, dict) and document.get("type") in ("error", "response.failed"):
                self.exchanges.append(Exchange(SOCKET, headers, None, 400, message.data))
            await agent.send_str(message.data)
        await agent.close()

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Recorder"]:
        """Listen on a free port of this machine."""
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self.handle)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        timeout = aiohttp.ClientTimeout(total=None)
        try:
            async with aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as self._session:
                yield self
        finally:
            await runner.cleanup()


def _decoded(data: bytes | str) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data if isinstance(data, str) else data.decode(errors="replace")


def _refusal(path: str, status: int) -> web.Response:
    kind = "overloaded_error" if status in (503, 529) else "rate_limit_error"
    error = {"type": kind, "message": "Try again."}
    document = {"type": "error", "error": error} if path == "/v1/messages" else {"error": error}
    return web.json_response(document, status=status, headers={"retry-after": "0"})
