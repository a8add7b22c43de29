"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's endpoints, their answers (a stream of typed events, or one whole message), and errors.

`input_tokens` counts what was neither read from a cache nor written to one, as Anthropic defines it: the three counts
add up to the prompt. An error has the format of the API that its path belongs to (`respond_error`): Anthropic's, or OpenAI's.

Encoding is pure.
"""

import math
import re
from hashlib import blake2b
from typing import Any, Final

import msgspec

from headwater.actors.edge.answer.choice import ResponseEncoder
from headwater.actors.edge.answer.run import Generator
from headwater.actors.edge.apis.anthropic_translate import ID_PREFIX, to_generation, to_prompt
from headwater.actors.edge.apis.anthropic_types import (
    CountTokensRequest,
    MessagesRequest,
    TokenCount,
    decode_fields,
)
from headwater.actors.edge.parsing.grammar import (
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)
from headwater.actors.edge.prompt.request import (
    ChoiceEnd,
    GenerationResult,
    GenerationStart,
    TokenDetail,
    TokenUsage,
)
from headwater.actors.edge.saga.http_call import Call, Serving
from headwater.actors.http.asgi import HeaderAdder, Headers, Send, respond, server_sent
from headwater.actors.http.errors import ApiError, bad_request

MESSAGE_CHARACTERS_MAX: Final = 1_500
OVERLOADED: Final = 529
"""Anthropic's status for what others call 503; its clients retry both."""

KINDS: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}


def error_document(error: ApiError, request_id: str | None = None) -> dict[str, Any]:
    """`{"type": "error", "error": {type, message}, "request_id"}`."""
    kind = KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    details = {"type": kind, "message": str(error)[:MESSAGE_CHARACTERS_MAX]}
    return {"type": "error", "error": details, "request_id": request_id}


def status_of(error: ApiError) -> int:
    """The status of an error response."""
    return OVERLOADED if error.status == 503 else error.status


# Messages and their events.

_json = msgspec.json.encode
INVALID_JSON: Final = "INVALID_JSON"
"""The member of a tool's input that contains arguments which are not a JSON object: the answer was cut off."""

PING: Final = b'event: ping\ndata: {"type":"ping"}\n\n'


def _event(kind: str, **fields: Any) -> bytes:
    return server_sent(kind.encode(), _json({"type": kind, **fields}))


def _signature() -> "blake2b":
    """A digest of a thinking block's text. It is opaque to clients, and not verified when a block comes back."""
    return blake2b(digest_size=32, person=b"thinking")


def usage_of(usage: TokenUsage) -> dict[str, Any]:
    """Token counts. Both cache counts are null if the server does not disclose them."""
    read, written = usage.cached_tokens, usage.cache_write_tokens
    return {
        "input_tokens": max(0, usage.prompt_tokens - (read or 0) - (written or 0)),
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": read,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        "server_tool_use": None,
    }


def _message_usage(usage: TokenUsage) -> dict[str, Any]:
    written = usage.cache_write_tokens
    creation = {"ephemeral_5m_input_tokens": written, "ephemeral_1h_input_tokens": 0}
    return {
        **usage_of(usage),
        "cache_creation": None if written is None else creation,
        "inference_geo": None,
        "service_tier": "standard",
    }


def _stop(end: ChoiceEnd, tokens: int, max_tokens: int) -> dict[str, Any]:
    """stop_reason, and the sequence that ended the answer."""
    if end.reason == "stop" and end.stop:
        return {"stop_reason": "stop_sequence", "stop_sequence": end.stop}
    if end.reason == "length" and tokens < max_tokens:
        return {"stop_reason": "model_context_window_exceeded", "stop_sequence": None}
    reason = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[end.reason]
    return {"stop_reason": reason, "stop_sequence": None}


def _message(start: GenerationStart, content: list[Any], stop: dict[str, Any], usage: TokenUsage) -> Any:
    return {
        "id": ID_PREFIX + start.id,
        "type": "message",
        "role": "assistant",
        "model": start.model,
        "content": content,
        **stop,
        "stop_details": None,
        "container": None,
        "usage": _message_usage(usage),
    }


def _tool_use(call: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call, "name": name, "input": arguments, "caller": {"type": "direct"}}


def _text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "citations": None}


class MessageEncoder(ResponseEncoder):
    """Encodes one message.

    `max_tokens` as the client requested them: an answer that is cut off before has filled the model's context.
    `omit_thinking`: thinking blocks have a signature and no text.
    """

    def __init__(self, max_tokens: int = 0, *, omit_thinking: bool = False) -> None:
        self._max_tokens = max_tokens
        self._omit_thinking = omit_thinking
        self._index = -1
        self._open = ""
        self._text_head = b""
        self._digest = _signature()

    def start(self, start: GenerationStart) -> bytes:
        """See `ResponseEncoder.start`."""
        nothing = {"stop_reason": None, "stop_sequence": None}
        return _event("message_start", message=_message(start, [], nothing, start.usage))

    def text(self, index: int, text: str, detail: TokenDetail | None) -> bytes:
        """See `ResponseEncoder.text`."""
        if not text:
            return b""
        before = b"" if self._open == "text" else self._begin("text", _text_block(""))
        return before + self._text_head + _json(text) + b"}}\n\n"

    def delta(self, index: int, event: OutputEvent, detail: TokenDetail | None) -> bytes:
        """See `ResponseEncoder.delta`."""
        if isinstance(event, TextDelta):
            return self.text(index, event.text, detail)
        if isinstance(event, ReasoningDelta):
            return self._thinking(event.text)
        if isinstance(event, ToolCallStart):
            return self._begin("tool_use", _tool_use(event.id, event.name, {}))
        if isinstance(event, ToolArgumentsDelta):
            return self._delta("input_json_delta", partial_json=event.text) if event.text else b""
        assert isinstance(event, ToolCallEnd), event
        return self._close()

    def end_choice(self, index: int, end: ChoiceEnd) -> bytes:
        """See `ResponseEncoder.end_choice`."""
        return self._close()

    def end(self, result: GenerationResult) -> bytes:
        """See `ResponseEncoder.end`."""
        stop = _stop(result.choices[0].end, result.usage.completion_tokens, self._max_tokens)
        delta = {**stop, "stop_details": None, "container": None}
        return _event("message_delta", delta=delta, usage=usage_of(result.usage)) + _event("message_stop")

    def fail(self, error: ApiError) -> bytes:
        """See `ResponseEncoder.fail`."""
        return server_sent(b"error", _json(error_document(error)))

    def ping(self) -> bytes:
        """See `ResponseEncoder.ping`."""
        return PING

    def encode_result(self, result: GenerationResult) -> bytes:
        """See `ResponseEncoder.encode_result`."""
        choice = result.choices[0]
        content: list[Any] = []
        if choice.reasoning:
            digest = _signature()
            digest.update(choice.reasoning.encode("utf-8", "surrogatepass"))
            shown = "" if self._omit_thinking else choice.reasoning
            content.append({"type": "thinking", "thinking": shown, "signature": digest.hexdigest()})
        if choice.text:
            content.append(_text_block(choice.text))
        content += [_tool_use(call.id, call.name, _input(call.arguments)) for call in choice.calls]
        stop = _stop(choice.end, result.usage.completion_tokens, self._max_tokens)
        return _json(_message(result.start, content, stop, result.usage))

    def _thinking(self, text: str) -> bytes:
        if not text:
            return b""
        before = b""
        if self._open != "thinking":
            self._digest = _signature()
            before = self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
        self._digest.update(text.encode("utf-8", "surrogatepass"))
        return before if self._omit_thinking else before + self._delta("thinking_delta", thinking=text)

    def _begin(self, kind: str, block: dict[str, Any]) -> bytes:
        closed = self._close()
        self._open = kind
        self._index += 1
        self._text_head = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":'
            b'{"type":"text_delta","text":' % self._index
        )
        return closed + _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, kind: str, **fields: str) -> bytes:
        return _event("content_block_delta", index=self._index, delta={"type": kind, **fields})

    def _close(self) -> bytes:
        if not self._open:
            return b""
        signed = b""
        if self._open == "thinking":
            signed = self._delta("signature_delta", signature=self._digest.hexdigest())
        self._open = ""
        return signed + _event("content_block_stop", index=self._index)


def _input(arguments: str) -> Any:
    try:
        decoded = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        decoded = None
    # The text itself: decoding would round large numbers.
    return msgspec.Raw(arguments.encode()) if isinstance(decoded, dict) else {INVALID_JSON: arguments}


# The endpoints.

VERSION: Final = re.compile(rb"20\d\d-\d\d-\d\d")
"""A value of the header anthropic-version, which a request may leave out.

Versions up to 2026-10-21 differ in what Anthropic's servers refuse, not in the format: each gets the same answer. So do
later ones, which a client sends after an upgrade.
"""

REQUEST_PREFIX: Final = "req_"


def request_id_header(id_: str) -> tuple[bytes, bytes]:
    """The header in which Anthropic's clients look for the id of a request."""
    return b"request-id", (REQUEST_PREFIX + id_).encode()


class AnthropicApi:
    """The endpoints of Anthropic's Messages API."""

    def __init__(self, serving: Serving, generator: Generator) -> None:
        self._serving = serving
        self._generator = generator

    async def messages(self, call: Call) -> None:
        """POST /v1/messages."""
        check_version(call.headers)
        request = decode_fields(MessagesRequest, call.body)
        self._serving.fields.count(request)
        id_ = call.make_id(self._serving.workers.ports.ids)
        omit = request.thinking is not None and request.thinking.display == "omitted"
        encoder = MessageEncoder(request.max_tokens, omit_thinking=omit)
        send = HeaderAdder(call.send, lambda: [request_id_header(id_)])
        generation_request = to_generation(request, id_)
        await self._generator.run(generation_request, encoder, call._replace(send=send))

    async def count_tokens(self, call: Call) -> None:
        """POST /v1/messages/count_tokens: renders and encodes the prompt; no engine is involved."""
        check_version(call.headers)
        request = decode_fields(CountTokensRequest, call.body)
        self._serving.fields.count(request)
        prompt_request = to_prompt(request)
        prepared = await self._generator.prepare(prompt_request, call)
        header = request_id_header(self._serving.workers.ports.ids())
        await call.answer(TokenCount(prepared.prompt_tokens), [header])


def check_version(headers: Headers) -> None:
    """Raises `ApiError` 400 for what is no version of the API."""
    for name, value in headers:
        if name == b"anthropic-version" and not VERSION.fullmatch(value):
            raise bad_request(
                "The header anthropic-version must be a date, such as 2026-10-21.", param="anthropic-version"
            )


# Errors, in the format of the API that a path belongs to.


def is_anthropic(path: str) -> bool:
    """Return whether a path belongs to Anthropic's API."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


async def respond_error(send: Send, path: str, error: ApiError, id_: str) -> int:
    """Send an error; returns its status. `id_` names the response where the format has a name for it."""
    status, document, headers = error.status, error.document(), [*error.headers]
    if error.retry_after_s > 0:
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s))))
    if is_anthropic(path):
        status, document = status_of(error), error_document(error, REQUEST_PREFIX + id_)
        headers.append(request_id_header(id_))
    await respond(send, status, msgspec.json.encode(document), headers)
    return status
