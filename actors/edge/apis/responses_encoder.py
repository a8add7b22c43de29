"""Generation's events as those of the Responses API. Pure but for the clock that dates the end.

A whole response is the stream's last event without the stream, so the two cannot differ.
"""

from collections.abc import Callable
from typing import Any, Final

import msgspec

from headwater.actors.edge.answer.choice import ResponseEncoder
from headwater.actors.edge.apis.chat_encoder import TokenNames, logprob_entries
from headwater.actors.edge.apis.responses_items import Item
from headwater.actors.edge.apis.responses_output import (
    CustomCallOutput,
    Ending,
    Event,
    FunctionCallOutput,
    MessageOutput,
    OutputItem,
    ReasoningOutput,
    item_id,
)
from headwater.actors.edge.apis.responses_requests import ID_PREFIX, ToolSet
from headwater.actors.edge.apis.responses_types import CreateFields, TextFormat
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
    ChoiceResult,
    GenerationResult,
    GenerationStart,
    TokenDetail,
    TokenUsage,
)
from headwater.actors.http.asgi import PING, server_sent
from headwater.actors.http.errors import ApiError

Framing = Callable[[bytes, bytes], bytes]
"""An event's type and its JSON text, as the bytes to send."""


def json_line(kind: bytes, data: bytes) -> bytes:
    """One line, which becomes one WebSocket message. JSON text contains no line breaks of its own."""
    del kind
    return data + b"\n"


# The `Response` object.

Resource = dict[str, Any]
"""A response as JSON. Every member that a client may require is present; those that are never null are not."""

MODEL_DEFAULTS: Final = {"temperature": 1.0, "top_p": 1.0}


def new_resource(
    fields: CreateFields,
    id_: str,
    tools: list[dict[str, Any]],
    defaults: dict[str, float],
    *,
    stored: bool,
    created_s: int = 0,
) -> Resource:
    """A response that has just begun. `defaults`: the model's own sampling. `id_`: without its prefix."""

    def number(name: str) -> float:
        field_value: float | None = getattr(fields, name)
        return field_value if field_value is not None else defaults.get(name, MODEL_DEFAULTS[name])

    reasoning = fields.reasoning
    return {
        "id": ID_PREFIX + id_,
        "object": "response",
        "created_at": created_s,
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": fields.model,
        "instructions": fields.instructions,
        "previous_response_id": fields.previous_response_id,
        "conversation": {"id": fields.conversation_id} if fields.conversation_id else None,
        "output": [],
        "tools": tools,
        "tool_choice": "auto" if fields.tool_choice is None else fields.tool_choice,
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "max_tool_calls": fields.max_tool_calls,
        "max_output_tokens": fields.max_output_tokens,
        "reasoning": {
            "effort": reasoning.effort if reasoning else None,
            "summary": (reasoning.summary or reasoning.generate_summary) if reasoning else None,
        },
        "text": _text(fields),
        "temperature": number("temperature"),
        "top_p": number("top_p"),
        "presence_penalty": fields.presence_penalty or 0.0,
        "frequency_penalty": fields.frequency_penalty or 0.0,
        "top_logprobs": fields.top_logprobs or 0,
        "truncation": fields.truncation or "disabled",
        "service_tier": "default",
        "store": stored,
        "metadata": fields.metadata or {},
        "user": fields.user,
        "safety_identifier": fields.safety_identifier,
        "prompt_cache_key": fields.prompt_cache_key,
        "usage": None,
    }


def _text(fields: CreateFields) -> dict[str, Any]:
    text: dict[str, Any] = {"format": _format(fields.text.format if fields.text else None)}
    if fields.text and fields.text.verbosity:
        text["verbosity"] = fields.text.verbosity
    return text


def _format(text_format: TextFormat | None) -> dict[str, Any]:
    if text_format is None or text_format.type != "json_schema":
        return {"type": text_format.type if text_format else "text"}
    return {
        "type": "json_schema",
        "name": text_format.name,
        "description": text_format.description,
        "schema": text_format.json_schema,
        # The schema is always enforced.
        "strict": True,
    }


def usage_document(usage: TokenUsage) -> dict[str, Any]:
    """Usage as the API spells it. Counts that are not disclosed are 0: clients require integers."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens or 0,
            "cache_write_tokens": usage.cache_write_tokens or 0,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


# Generation's events.

_json = msgspec.json.encode
_DELTA: Final = b"response.output_text.delta"


class ResponsesEncoder(ResponseEncoder):
    """One response. `resource` is its object so far, and its final one after `end` or `encode_result`."""

    def __init__(
        self,
        resource: Resource,
        names: TokenNames,
        now_s: Callable[[], int],
        tools: ToolSet | None = None,
        *,
        framing: Framing = server_sent,
        encrypted_reasoning: bool = False,
    ) -> None:
        self.resource = resource
        self._names = names
        self._now_s = now_s
        self._frame = framing
        self._custom = tools.custom if tools is not None else frozenset[str]()
        self._namespaces = tools.namespaces if tools is not None else {}
        self._encrypted = encrypted_reasoning
        self._sequence = 0
        self._id = ""
        self._done: dict[int, Item] = {}
        self._items = 0
        self._message: MessageOutput | None = None
        self._reasoning: ReasoningOutput | None = None
        self._calls: dict[int, FunctionCallOutput | CustomCallOutput] = {}
        self._text_head = b""

    def start(self, start: GenerationStart) -> bytes:
        """See `ResponseEncoder.start`."""
        self._begin(start)
        return self.start_empty()

    def _begin(self, start: GenerationStart) -> None:
        self._id = start.id
        self.resource |= {"created_at": start.created_s, "model": start.model}

    def start_empty(self) -> bytes:
        """Begin the stream of a response that only takes its input."""
        return self._events(
            ("response.created", {"response": self.resource}),
            ("response.in_progress", {"response": self.resource}),
        )

    def text(self, index: int, text: str, detail: TokenDetail | None) -> bytes:
        """See `ResponseEncoder.text`."""
        del index
        head = b"" if self._message is not None else self._open_message()
        message = self._message
        assert message is not None
        message.pieces.append(text)
        logprobs = b"[]"
        if detail is not None and detail.logprobs:
            entries = logprob_entries(self._names, detail)
            message.logprobs += entries
            logprobs = _json(entries)
        elif not text:
            return head
        data = self._text_head + b'%d,"delta":%b,"logprobs":%b}' % (self._sequence, _json(text), logprobs)
        self._sequence += 1
        return head + self._frame(_DELTA, data)

    def _open_message(self) -> bytes:
        closed = self._close("completed")
        message = MessageOutput(item_id("message", self._id, self._items), self._next_index())
        self._message = message
        place = _json({"type": _DELTA.decode(), **message.place})
        self._text_head = place[:-1] + b',"sequence_number":'
        return closed + self._events(*message.added())

    def delta(self, index: int, event: OutputEvent, detail: TokenDetail | None) -> bytes:
        """See `ResponseEncoder.delta`."""
        if isinstance(event, TextDelta):
            return self.text(index, event.text, detail)
        if isinstance(event, ReasoningDelta):
            head = b"" if self._reasoning is not None else self._open_reasoning()
            assert self._reasoning is not None
            return head + self._events(*self._reasoning.grow(event.text))
        if isinstance(event, ToolCallStart):
            return self._open_call(event)
        if isinstance(event, ToolArgumentsDelta):
            return self._events(*self._calls[event.call].grow(event.text))
        return self._finish(self._calls.pop(event.call), "completed")

    def _open_reasoning(self) -> bytes:
        closed = self._close("completed")
        id_ = item_id("reasoning", self._id, self._items)
        self._reasoning = ReasoningOutput(id_, self._next_index(), encrypted=self._encrypted)
        return closed + self._events(*self._reasoning.added())

    def _open_call(self, event: ToolCallStart) -> bytes:
        closed = self._close("completed", calls=False)
        custom = event.name in self._custom
        kind = CustomCallOutput if custom else FunctionCallOutput
        id_ = item_id(kind.kind, self._id, self._items)
        namespace, name = self._namespaces.get(event.name, ("", event.name))
        call = kind(id_, self._next_index(), event.id, name, namespace)
        self._calls[event.call] = call
        return closed + self._events(*call.added())

    def end_choice(self, index: int, end: ChoiceEnd) -> bytes:
        """See `ResponseEncoder.end_choice`. A response has at least one item, if with no text."""
        del index
        head = b"" if self._items else self._open_message()
        return head + self._close("incomplete" if end.reason == "length" else "completed")

    def end(self, result: GenerationResult | None) -> bytes:
        """See `ResponseEncoder.end`."""
        self.complete(result)
        kind = "response.incomplete" if self.resource["incomplete_details"] else "response.completed"
        return self._events((kind, {"response": self.resource}))

    def complete(self, result: GenerationResult | None) -> Resource:
        """The whole response object, which `end` or `encode_result` sends; None: it only takes its input. Repeated calls change nothing."""
        if self.resource["status"] != "in_progress":
            return self.resource
        if result is None:
            usage = usage_document(TokenUsage(0, 0))
            self.resource |= {"status": "completed", "completed_at": self._now_s(), "usage": usage}
            return self.resource
        choice = result.choices[0]
        if not self._id:
            # Nothing was streamed.
            self._begin(result.start)
            self._replay(choice)
            self.end_choice(0, choice.end)
        cut = choice.end.reason == "length"
        self.resource |= {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "completed_at": None if cut else self._now_s(),
            "output": self._output(),
            "usage": usage_document(result.usage),
        }
        return self.resource

    def fail(self, error: ApiError) -> bytes:
        """See `ResponseEncoder.fail`. `error` is for HTTP clients that raise, `response.failed` ends every stream."""
        code = error.code or ("server_error" if error.status >= 500 else "invalid_prompt")
        message = error.document()["error"]["message"]
        self.resource |= {
            "status": "failed",
            "error": {"code": _failure_code(error), "message": message},
            "output": self._output(),
        }
        nested = {"type": error.kind, "code": code, "message": message, "param": error.param}
        failed: Event = ("response.failed", {"response": self.resource})
        if self._frame is not server_sent:
            return self._events(failed)
        flat = {"code": code, "message": message, "param": error.param}
        return self._events(("error", {**flat, "error": nested}), failed)

    def ping(self) -> bytes:
        """See `ResponseEncoder.ping`. A WebSocket has pings of its own."""
        return PING if self._frame is server_sent else b""

    def encode_result(self, result: GenerationResult) -> bytes:
        """See `ResponseEncoder.encode_result`."""
        return _json(self.complete(result))

    def _replay(self, choice: ChoiceResult) -> None:
        """The items of a whole choice, in the order in which a stream has them."""
        if choice.reasoning:
            self.delta(0, ReasoningDelta(choice.reasoning), None)
        if choice.text or choice.detail.logprobs:
            self.text(0, choice.text, choice.detail)
        for number, call in enumerate(choice.calls):
            self.delta(0, ToolCallStart(number, call.name, call.id), None)
            self.delta(0, ToolArgumentsDelta(number, call.arguments), None)
            if number + 1 < len(choice.calls):
                self.delta(0, ToolCallEnd(number), None)

    def _next_index(self) -> int:
        self._items += 1
        return self._items - 1

    def _close(self, status: Ending, *, calls: bool = True) -> bytes:
        """Finish what is open. Parallel calls may be open at the same time."""
        closed = b""
        if self._reasoning is not None:
            item, self._reasoning = self._reasoning, None
            closed += self._finish(item, status)
        if self._message is not None:
            message, self._message = self._message, None
            closed += self._finish(message, status)
        if calls:
            open_calls, self._calls = self._calls, {}
            for call in open_calls.values():
                closed += self._finish(call, status)
        return closed

    def _finish(self, item: OutputItem, status: Ending) -> bytes:
        events, finished_item = item.finished(status)
        self._done[item.index] = finished_item
        return self._events(*events)

    def _output(self) -> list[Item]:
        return [self._done[index] for index in sorted(self._done)]

    def _events(self, *events: Event) -> bytes:
        framed: list[bytes] = []
        for kind, members in events:
            document: dict[str, Any] = {"type": kind, "sequence_number": self._sequence, **members}
            framed.append(self._frame(kind.encode(), _json(document)))
            self._sequence += 1
        return b"".join(framed)


def _failure_code(error: ApiError) -> str:
    """One of the codes that the API knows for a failed response."""
    if error.status == 429:
        return "rate_limit_exceeded"
    return "server_error" if error.status >= 500 else "invalid_prompt"
