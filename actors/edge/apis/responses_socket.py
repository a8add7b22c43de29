"""WebSocket mode: `response.create` messages in, the events of their responses out, one message each.

stream ids    requests with the same `stream_id`, or without one, are answered one after the other; of different ones at
              the same time. Events carry the id.
state         the newest responses of a connection can be continued on it even if they were not stored; one whose
              continuation was rejected cannot
errors        an event `error` with HTTP's status; the connection stays open
end           a connection closes after its time limit, and when the edge drains, each time after its running responses
"""

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Final

import msgspec

from headwater.actors import metrics
from headwater.actors.edge.admit.control import Principal
from headwater.actors.edge.admit.limiter import NO_QUOTA, RequestQuota
from headwater.actors.edge.answer.run import Generator
from headwater.actors.edge.apis.responses_creation import LocalResponses, ResponseCreator
from headwater.actors.edge.apis.responses_encoder import json_line
from headwater.actors.edge.apis.responses_types import CreateFields
from headwater.actors.edge.prompt.request import GenerationResult
from headwater.actors.edge.saga.fields import served
from headwater.actors.edge.saga.http_call import Call, internal_error
from headwater.actors.http.asgi import Headers
from headwater.actors.http.body import check_shape, decode_body
from headwater.actors.http.connection import WebSocket
from headwater.actors.http.errors import ApiError, bad_field, bad_request, overloaded

STREAMS_MAX: Final = 32
ACTIVE_MAX: Final = 16
WAITING_MAX: Final = 64

_STREAM_ID: Final = re.compile(r"[A-Za-z0-9_.-]{1,256}\Z")


class CreateEvent(CreateFields, kw_only=True):
    """A `response.create` message."""

    type: Annotated[str, served("response.create; response.steer is rejected")]
    stream_id: Annotated[str | None, served("responses of different streams run at the same time")] = None
    generate: Annotated[
        bool | None, served("false stores the input, so that the next request can refer to it")
    ] = None


class _Peek(msgspec.Struct):
    """What a message must have for its answer to find its way."""

    type: Any = None
    stream_id: Any = None


Admit = Callable[[], Awaitable[tuple[Principal, RequestQuota]]]
"""Authenticates the sender of one request, and gives what that request may take. Raises `ApiError` 401 and 403."""


class ResponsesSocket:
    """Serves connections. One per edge."""

    def __init__(self, generator: Generator, creator: ResponseCreator, connection_s: float) -> None:
        self.generator = generator
        self.creator = creator
        self.connection_s = connection_s

    async def serve(self, socket: WebSocket, call: Call, admit: Admit) -> None:
        """Answer the messages of an accepted connection until it closes.

        `call` has its headers and its sender; `admit` authenticates that sender again for each request.
        """
        async with asyncio.TaskGroup() as tasks:
            session = _Session(self, socket, call, admit, tasks)
            try:
                await session.run()
            finally:
                session.end()


class _Session:
    """One connection."""

    def __init__(
        self, server: ResponsesSocket, socket: WebSocket, call: Call, admit: Admit, tasks: asyncio.TaskGroup
    ) -> None:
        self._server = server
        self._socket = socket
        self._call = call
        self._admit = admit
        self._tasks = tasks
        self._local = LocalResponses()
        self._streams: dict[str | None, asyncio.Queue[bytes]] = {}
        self._running: list[asyncio.Task[Any]] = []
        self._active = asyncio.Semaphore(ACTIVE_MAX)
        self._open = 0
        self._closing: ApiError | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    async def run(self) -> None:
        """Read messages until the client disconnects, or the connection is to close and has nothing left to answer."""
        reader = self._tasks.create_task(self._read(), name="responses socket reader")
        closer = self._tasks.create_task(self._close_in_time(), name="responses socket closer")
        # Closed here, because the client does not read, while the reader still waits for it.
        closed = self._tasks.create_task(self._socket.closed.wait(), name="responses socket closed")
        self._running += [reader, closer, closed]
        await asyncio.wait({reader, closer, closed}, return_when=asyncio.FIRST_COMPLETED)

    def end(self) -> None:
        """Cancel what still runs: the client is gone."""
        for task in self._running:
            task.cancel()

    async def _read(self) -> None:
        while (message := await self._socket.receive()) is not None:
            try:
                await self._enqueue(message)
            except ApiError as error:
                self._fail(error, None)

    async def _close_in_time(self) -> None:
        """Close once the edge drains, or after the longest time, when no response is running."""
        drained = await self._socket.wait_for_drain(self._server.connection_s)
        self._closing = (
            overloaded("This edge is shutting down; connect again.")
            if drained
            else ApiError(
                400,
                "The connection has reached its maximum age; connect again.",
                code="websocket_connection_limit_reached",
            )
        )
        if not drained:
            self._fail(self._closing, None)
        await self._idle.wait()
        await self._socket.close(1012 if drained else 1000)

    async def _enqueue(self, message: bytes) -> None:
        """Hand a message to its stream. Raises `ApiError` for one that has none."""
        await check_shape(message)
        head = decode_body(_Peek, message)
        stream_id = head.stream_id
        if stream_id is not None and not (isinstance(stream_id, str) and _STREAM_ID.match(stream_id)):
            raise bad_field(
                "stream_id",
                "must have 1 to 256 letters, digits, dots, dashes and underscores.",
                code="invalid_stream_id",
            )
        try:
            if head.type == "response.steer":
                raise bad_request("response.steer is not supported.", param="type", code="unsupported_event")
            if head.type != "response.create":
                raise bad_field("type", "must be response.create.", code="unsupported_event")
            if self._closing is not None:
                raise self._closing
            self._queue_of(stream_id).put_nowait(message)
            self._open += 1
            self._idle.clear()
        except ApiError as error:
            self._fail(error, stream_id)

    def _queue_of(self, stream_id: str | None) -> asyncio.Queue[bytes]:
        if self._open >= WAITING_MAX:
            raise ApiError(
                429,
                f"{WAITING_MAX} requests of this connection are not answered yet.",
                kind="rate_limit_error",
                code="too_many_requests",
            )
        queue = self._streams.get(stream_id)
        if queue is None:
            if len(self._streams) - (None in self._streams) >= STREAMS_MAX and stream_id is not None:
                raise bad_request(
                    f"A connection has at most {STREAMS_MAX} streams.",
                    param="stream_id",
                    code="websocket_stream_limit_reached",
                )
            queue = self._streams[stream_id] = asyncio.Queue()
            self._running.append(
                self._tasks.create_task(self._answer_all(queue, stream_id), name="responses socket stream")
            )
        return queue

    async def _answer_all(self, queue: asyncio.Queue[bytes], stream_id: str | None) -> None:
        """Answer one stream's requests in their order."""
        while True:
            body = await queue.get()
            try:
                async with self._active:
                    await self._answer(body, stream_id)
            finally:
                self._open -= 1
                if not self._open:
                    self._idle.set()

    async def _answer(self, body: bytes, stream_id: str | None) -> None:
        previous: str | None = None
        quota = NO_QUOTA
        try:
            # A connection may outlive its key.
            principal, quota = await self._admit()
            fields = decode_body(CreateEvent, body)
            previous = fields.previous_response_id
            call = self._call._replace(body=body, receive=self._gone, principal=principal, quota=quota)
            await self._create(fields, call, stream_id)
        except ApiError as error:
            if previous is not None:
                # Its client must send the conversation again rather than continue from a state that it cannot know.
                self._local.discard(previous)
            self._fail(error, stream_id)
        except Exception as error:
            self._fail(internal_error("websocket", error), stream_id)
        finally:
            quota.leave()

    async def _create(self, fields: CreateEvent, call: Call, stream_id: str | None) -> None:
        creation = await self._server.creator.begin(
            fields, call, stream=True, framing=json_line, local=self._local
        )
        sink = _StreamSink(self._socket, stream_id)

        async def save(result: GenerationResult | None) -> None:
            response = await self._server.creator.save(creation, result)
            self._local.add((*creation.history.chain, response))

        if fields.generate is False:
            sink.write(creation.encoder.start_empty())
            await save(None)
            sink.write(creation.encoder.end(None))
            return
        await self._server.generator.run(creation.request, creation.encoder, call, sink, before_end=save)

    async def _gone(self) -> dict[str, Any]:
        """The disconnect message of a request: when its connection ends."""
        await self._socket.closed.wait()
        return {"type": "http.disconnect"}

    def _fail(self, error: ApiError, stream_id: str | None) -> None:
        metrics.HTTP_ERRORS.labels(str(error.status)).inc()
        document: dict[str, Any] = {
            "type": "error",
            "status": error.status,
            "error": {**error.document()["error"], "code": error.code or error.kind},
        }
        if stream_id is not None:
            document["stream_id"] = stream_id
        self._socket.send(msgspec.json.encode(document))


class _StreamSink:
    """Events of one response as messages of a connection. See `ByteSink`."""

    def __init__(self, socket: WebSocket, stream_id: str | None) -> None:
        self._socket = socket
        self._mark = b"" if stream_id is None else b',"stream_id":' + msgspec.json.encode(stream_id) + b"}"

    @property
    def cut(self) -> bool:
        """See `ByteSink.cut`."""
        return self._socket.closed.is_set()

    async def start(self, headers: Headers) -> None:
        """See `ByteSink.start`. A message has no headers."""

    def write(self, data: bytes, *, last: bool = False) -> None:
        """See `ByteSink.write`."""
        del last
        for event in data.splitlines():
            self._socket.send(event[:-1] + self._mark if self._mark else event)

    async def settle(self) -> None:
        """See `ByteSink.settle`."""

    async def respond(self, body: bytes, headers: Headers) -> None:
        """See `ByteSink.respond`."""
        raise AssertionError("every response is streamed")
