"""A client of OpenAI's streaming API that measures when tokens arrive.

Times are taken when the event loop hands over bytes, before they are parsed. Connections are kept and used again; a server may close an idle
one at any time, so a request that got no byte on such a connection is sent once more on a new one.
"""

import asyncio
import ssl
import time
from array import array
from typing import Any, Final, NamedTuple, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from headwater.ops.config.setting import ConfigError
from headwater.schemas.names import host_port

CAUSE_MAX: Final = 200
"""Characters of a failure's message that are kept."""


class PromptDetails(msgspec.Struct):
    """The part of the prompt that was cached."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """Token counts, as the server states them. -1: not stated."""

    prompt_tokens: int = -1
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were cached; -1 where the server does not say."""
        details = self.prompt_tokens_details
        return -1 if details is None or details.cached_tokens is None else details.cached_tokens


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: Usage | None = None
    error: Any = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


class Failure(NamedTuple):
    """Why a request failed: a short cause that equal failures share, and the message of this one."""

    cause: str
    message: str = ""


class StreamedAnswer:
    """One answer while it arrives, and afterwards. Times are seconds of `time.perf_counter`.

    `came_s` has the arrival of each piece; `pieces` of them have text, reasoning or calls. A token may have no text, as a special one or
    half a character. But an event that only opens the stream or ends it is no piece, unless the answer has no other.
    """

    def __init__(self) -> None:
        self.began_s = 0.0
        self.came_s = array("d")
        self.pieces = 0
        self.usage: Usage | None = None
        self.failure: Failure | None = None
        self.done = False
        self._texts: list[str] = []
        self._empty_s = array("d")
        self._rest = b""

    @property
    def text(self) -> str:
        """The answer without its reasoning."""
        return "".join(self._texts)

    def take(self, data: bytes, came_s: float) -> None:
        """Take bytes of an event stream."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._take_event(line[5:].strip(), came_s)

    def _take_event(self, data: bytes, came_s: float) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        try:
            chunk = _decode_chunk(data)
        except msgspec.DecodeError as error:
            self.failure = self.failure or Failure("unreadable event", f"{error}: {data[:100]!r}")
            return
        if chunk.error is not None:
            self.failure = self.failure or Failure("error in the stream", message_of(chunk.error))
        if chunk.usage is not None:
            self.usage = chunk.usage
        for choice in chunk.choices or ():
            delta = choice.delta
            text = choice.text or (delta.content if delta else "") or ""
            if text:
                self._texts.append(text)
            if text or (delta and (delta.reasoning_content or delta.reasoning or delta.tool_calls)):
                self.pieces += 1
                self.came_s.append(came_s)
            elif choice.finish_reason or (delta and delta.role):
                self._empty_s.append(came_s)
            else:
                self.came_s.append(came_s)

    def end(self) -> None:
        """Note that the response has ended."""
        self.came_s = self.came_s or self._empty_s
        if self.failure is None and not self.done:
            self.failure = Failure("truncated stream", "the stream ended before [DONE]")
        if self.failure is None and not self.came_s:
            self.failure = Failure("no token", "the answer has no token")


def message_of(error: object) -> str:
    """The message of an error object of OpenAI's API."""
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:CAUSE_MAX]


class _Connection(asyncio.Protocol):
    """One connection, one request at a time: `answered` is set when the response is whole, or the connection lost."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.answered: asyncio.Future[None] | None = None
        self.open = False
        self.received = 0
        self._parser: Any = None
        self._answer = StreamedAnswer()
        self._body = bytearray()
        self._now_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        # (uvloop's is none by inheritance.)
        self.transport, self.open = cast("asyncio.Transport", transport), True

    def send(self, data: bytes, answer: StreamedAnswer) -> "asyncio.Future[None]":
        """Send a request; its response goes to `answer`."""
        assert self.transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._answer, self.received = answer, 0
        self._body.clear()
        self.answered = asyncio.get_running_loop().create_future()
        self.transport.write(data)
        return self.answered

    def data_received(self, data: bytes) -> None:
        """Parse bytes of a response."""
        self._now_s = time.perf_counter()
        self.received += len(data)
        if self._parser is None or self.answered is None:
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._lose(Failure("no HTTP", str(error)))
            self.close()

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""
        if self._parser.get_status_code() == 200:
            self._answer.take(body, self._now_s)
        elif len(self._body) < 10_000:
            self._body += body

    def on_message_complete(self) -> None:
        """End the request, and close the connection if the server will."""
        status = self._parser.get_status_code()
        if status == 200:
            self._answer.end()
        else:
            self._answer.failure = Failure(f"HTTP {status}", _body_message(bytes(self._body)))
        if not self._parser.should_keep_alive():
            self.close()
        if self.answered is not None and not self.answered.done():
            self.answered.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the request if it is not answered."""
        self.open = False
        began = bool(self._answer.came_s or self._answer.done)
        cause = "truncated stream" if began else "connection lost"
        self._lose(Failure(cause, str(exc or "the server closed the connection")))

    def _lose(self, failure: Failure) -> None:
        if self.answered is not None and not self.answered.done():
            self._answer.failure = failure
            self.answered.set_result(None)

    def close(self) -> None:
        """Close."""
        self.open = False
        if self.transport is not None:
            self.transport.abort()


def _body_message(body: bytes) -> str:
    try:
        decoded = msgspec.json.decode(body)
        return message_of(
            decoded.get("error", decoded.get("detail", decoded)) if isinstance(decoded, dict) else decoded
        )
    except msgspec.DecodeError:
        return body[:CAUSE_MAX].decode(errors="replace")


class Address(NamedTuple):
    """The address of a server of OpenAI's API."""

    host: str
    port: int
    secure: bool
    prefix: str


def address_of(url: str, label: str) -> Address:
    """The parts of a URL, with or without /v1 at its end. `label` names it in the `ConfigError` for one that is none."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
        raise ConfigError(f"{label} {url}: write it as http://HOST:PORT")
    secure = parts.scheme == "https"
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    return Address(parts.hostname, port or (443 if secure else 80), secure, prefix)


class ModelList(msgspec.Struct):
    """What GET /v1/models says."""

    data: list[dict[str, Any]]


class LoadClient:
    """Sends requests to one server. Connections are closed with `close`."""

    def __init__(self, address: Address, key: str = "", timeout_s: float = 600.0) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._idle: list[_Connection] = []
        default = 443 if address.secure else 80
        named = host_port(address.host, address.port)
        self._host = named.removesuffix(f":{default}") if address.port == default else named
        self._key = f"authorization: Bearer {key}\r\n" if key else ""
        self._context = ssl.create_default_context() if address.secure else None

    async def models(self) -> list[str]:
        """The models of the server. Raises `ConfigError` if it cannot be asked, or does not list any."""
        path = f"{self.address.prefix}/v1/models"
        answer = _Whole()
        await self._exchange(self._head("GET", path, 0).encode(), answer)
        if answer.failure is not None and not answer.data:
            raise ConfigError(f"{self._host} is out of reach: {' '.join(answer.failure)}")
        try:
            names = [str(model["id"]) for model in msgspec.json.decode(answer.data, type=ModelList).data]
        except (msgspec.DecodeError, KeyError) as error:
            raise ConfigError(f"{self._host}: {path} is no list of models: {error}") from error
        if not names:
            raise ConfigError(f"{self._host} lists no models")
        return names

    async def post(self, path: str, body: bytes) -> StreamedAnswer:
        """Send a streaming request, and return its whole answer. A failure is an answer with one."""
        head = self._head("POST", self.address.prefix + path, len(body))
        answer = StreamedAnswer()
        await self._exchange(head.encode() + body, answer)
        return answer

    def _head(self, method: str, path: str, length: int) -> str:
        return (
            f"{method} {path} HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
            f"content-length: {length}\r\naccept: */*\r\nuser-agent: headwater-bench\r\n{self._key}\r\n"
        )

    async def _exchange(self, data: bytes, answer: StreamedAnswer) -> None:
        answer.began_s = time.perf_counter()
        connection: _Connection | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    kept_alive = self._kept()
                    connection = kept_alive or await self._connect()
                    await connection.send(data, answer)
                    if kept_alive is None or connection.received or connection.open:
                        break
                    # The server had closed the connection before the request came.
                    answer.failure = None
        except TimeoutError:
            answer.failure = Failure("timeout", f"not answered within {self._timeout_s:g} s")
        except OSError as error:
            answer.failure = Failure("no connection", str(error))
        finally:
            if connection is not None:
                if connection.open and connection.answered is not None and connection.answered.done():
                    self._idle.append(connection)
                else:
                    connection.close()

    def _kept(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                return connection
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            _Connection, self.address.host, self.address.port, ssl=self._context
        )
        return connection

    def close(self) -> None:
        """Close all idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()


class _Whole(StreamedAnswer):
    """An answer that is no stream."""

    def __init__(self) -> None:
        super().__init__()
        self.data = b""

    def take(self, data: bytes, came_s: float) -> None:
        """Keep the bytes."""
        self.data += data

    def end(self) -> None:
        """Nothing is missing."""
