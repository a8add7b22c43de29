"""Generation's events as responses of /v1/chat/completions and /v1/completions. Pure.

In log probabilities, with `as_ids`, tokens are named `token_id:ID` as vLLM does it, so that tokens of equal text can be told apart.
"""

import codecs
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, NamedTuple, Protocol

import msgspec

from headwater.actors.edge.answer.choice import ResponseEncoder
from headwater.actors.edge.apis.chat_types import ChatRequest, CompletionCommon, CompletionRequest
from headwater.actors.edge.parsing.grammar import (
    OutputEvent,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallStart,
)
from headwater.actors.edge.prompt.request import (
    ChoiceEnd,
    ChoiceResult,
    GenerationResult,
    GenerationStart,
    PromptDetail,
    TokenDetail,
    TokenUsage,
)
from headwater.actors.edge.settings import ReasoningField
from headwater.actors.edge.tokenizer import Tokenizer
from headwater.schemas.inference import TokenLogprob

LEAST: Final = -9999.0
"""JSON has no minus infinity; OpenAI uses this."""


class TokenNames(Protocol):
    """A tokenizer's names of tokens."""

    def text_of(self, token: int) -> str:
        """A token as text."""
        ...

    def bytes_of(self, token: int) -> bytes:
        """A token as bytes."""
        ...


def _names(tokenizer: TokenNames, *, as_ids: bool) -> Callable[[int], str]:
    """Return what names a token: its text, or its id."""
    return (lambda token: f"token_id:{token}") if as_ids else tokenizer.text_of


def logprob_entries(
    tokenizer: TokenNames, detail: TokenDetail, *, as_ids: bool = False
) -> list[dict[str, Any]]:
    """Log probabilities of a piece of text, one entry per token: the shape of chat completions and responses."""
    name = _names(tokenizer, as_ids=as_ids)

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": name(token),
            "logprob": max(logprob, LEAST),
            "bytes": list(tokenizer.bytes_of(token)),
        }

    return [
        {**entry(token, item.logprob), "top_logprobs": [entry(other, value) for other, value in item.top]}
        for token, item in zip(detail.tokens, detail.logprobs, strict=False)
    ]


class CompletionLogprobs:
    """The shape of completions, for one choice. Offsets count from the beginning of its text."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._name = _names(tokenizer, as_ids=as_ids)
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self.offset = 0
        """Length of the text before the next tokens, without a character that they complete."""

    def prompt(self, prompt: PromptDetail) -> dict[str, list[Any]]:
        """Return the log probabilities of an echoed prompt, whose first token has none. Its text may lack a special token and the space before it."""
        return self._document(prompt.tokens, prompt.logprobs, prompt.text)

    def answer(self, detail: TokenDetail) -> dict[str, list[Any]]:
        """Return the log probabilities of the next tokens of the answer."""
        return self._document(detail.tokens, detail.logprobs)

    def _named(self, token: int, item: TokenLogprob) -> dict[str, float]:
        """The alternatives and the chosen token by their names; of equal names, the likelier one's."""
        by_name: dict[str, float] = {}
        for other, value in (*item.top, (token, item.logprob)):
            name = self._name(other)
            by_name[name] = max(by_name.get(name, LEAST), value, LEAST)
        return by_name

    def _length_in(self, text: str, token: int, piece: str) -> int:
        """Return how many characters of a prompt's text are a token's."""
        if text.startswith(piece, self.offset):
            return len(piece)
        if token in self._tokenizer.special:
            return 0
        return len(piece) - (piece.startswith(" ") and text.startswith(piece[1:], self.offset))

    def _document(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob | None], text: str | None = None
    ) -> dict[str, list[Any]]:
        names = [self._name(token) for token in tokens]
        offsets: list[int] = []
        for token in tokens:
            offsets.append(self.offset)
            piece = self._characters.decode(self._tokenizer.bytes_of(token))
            self.offset += len(piece) if text is None else self._length_in(text, token, piece)
        return {
            "tokens": names,
            "token_logprobs": [item and max(item.logprob, LEAST) for item in logprobs],
            "top_logprobs": [
                item and self._named(token, item) for token, item in zip(tokens, logprobs, strict=False)
            ],
            "text_offset": offsets,
        }


# Chunks of a stream.

Endpoint = Literal["chat", "completions"]

DONE: Final = b"data: [DONE]\n\n"

_json = msgspec.json.encode


def event(document: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + _json(document) + b"\n\n"


class ChunkHead:
    """What all chunks of a response begin and end with. `usage`: they have a usage, null in all but the last."""

    def __init__(self, endpoint: Endpoint, name: str, created_s: int, model: str, *, usage: bool) -> None:
        kind = "chat.completion.chunk" if endpoint == "chat" else "text_completion"
        head = {"id": name, "object": kind, "created": created_s, "model": model}
        self.bytes = b"data: " + _json(head)[:-1] + b',"choices":['
        self.end = b'],"usage":null}\n\n' if usage else b"]}\n\n"

    def usage(self, counts: Any) -> bytes:
        """The chunk with the usage, which has no choices."""
        return self.bytes + b'],"usage":' + _json(counts) + b"}\n\n"

    def set_usage(self, counts: Any) -> None:
        """The usage of the chunks that follow."""
        self.end = b'],"usage":' + _json(counts) + b"}\n\n"


class ChunkWriter:
    """The chunks of one choice. Everything but the text of plain chunks is encoded once."""

    __slots__ = ("_head", "_plain_end", "_shared", "_text")

    def __init__(self, endpoint: Endpoint, head: ChunkHead, index: int) -> None:
        chat = endpoint == "chat"
        self._shared = head
        self._head = head.bytes + b'{"index":%d,' % index
        self._text = self._head + (b'"delta":{"content":' if chat else b'"text":')
        self._plain_end = (b"}" if chat else b"") + b',"logprobs":null,"finish_reason":null}' + head.end

    def text(self, text: str) -> bytes:
        """A chunk with nothing but new text."""
        return self._text + _json(text) + self._plain_end

    def choice(self, **fields: Any) -> bytes:
        """A chunk with these fields of the choice."""
        document = {
            **fields,
            "logprobs": fields.get("logprobs"),
            "finish_reason": fields.get("finish_reason"),
        }
        return self._head + _json(document)[1:] + self._shared.end


# The parts of a generation that a client asked to see.

REASONING_FIELDS: Final = ("reasoning_content", "reasoning")
"""The two names of reasoning that clients expect: DeepSeek's and SGLang's, and vLLM's."""


class ShownParts(NamedTuple):
    """`tokens_as_ids`: tokens of log probabilities are named by their ids. `usage`: a last chunk with it; `progress`: in every chunk too. `reasoning`: under these names, empty for none."""

    logprobs: bool = False
    prompt_logprobs: bool = False
    token_ids: bool = False
    tokens_as_ids: bool = False
    echo: bool = False
    usage: bool = False
    progress: bool = False
    reasoning: tuple[str, ...] = REASONING_FIELDS


def shown_in_chat(request: ChatRequest, field: ReasoningField = "both") -> ShownParts:
    """Return the parts that a chat completion shows. `field`: the name of reasoning on this edge."""
    names = REASONING_FIELDS if field == "both" else (field,)
    reasoning = names if request.include_reasoning is not False else ()
    return _shown(request)._replace(logprobs=bool(request.logprobs), reasoning=reasoning)


def shown_in_completion(request: CompletionRequest) -> ShownParts:
    """Return the parts that a text completion shows."""
    return _shown(request)._replace(logprobs=request.logprobs is not None, echo=bool(request.echo))


def _shown(request: CompletionCommon) -> ShownParts:
    streamed = request.stream_options
    return ShownParts(
        prompt_logprobs=request.prompt_logprobs is not None,
        token_ids=bool(request.return_token_ids),
        tokens_as_ids=bool(request.return_tokens_as_token_ids),
        usage=streamed is not None and streamed.include_usage,
        progress=streamed is not None and streamed.continuous_usage_stats,
    )


# The common part of both APIs.


class PromptTokens(msgspec.Struct, omit_defaults=True):
    """Prompt tokens that were read from an engine's cache, those that were computed and stored there, and those that stand for audio."""

    cached_tokens: int | None = None
    cache_write_tokens: int | None = None
    audio_tokens: int | None = None


NO_DETAILS: Final = PromptTokens()


class CompletionTokens(msgspec.Struct):
    """Tokens of the completion that were reasoning."""

    reasoning_tokens: int


class Usage(msgspec.Struct, omit_defaults=True):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens | None = None
    completion_tokens_details: CompletionTokens | None = None


def usage_of(counts: TokenUsage) -> Usage:
    """The counts in OpenAI's shape."""
    details = PromptTokens(counts.cached_tokens, counts.cache_write_tokens, counts.audio_tokens or None)
    return Usage(
        counts.prompt_tokens,
        counts.completion_tokens,
        counts.total_tokens,
        details if details != NO_DETAILS else None,
        CompletionTokens(counts.reasoning_tokens) if counts.reasoning_tokens else None,
    )


class OpenAiEncoder(ResponseEncoder):
    """See `ResponseEncoder`."""

    endpoint: Endpoint
    prefix: str
    kind: str

    def __init__(self, tokenizer: Tokenizer, shown: ShownParts) -> None:
        self._tokenizer = tokenizer
        self._shown = shown
        self.wants_progress = shown.progress
        self._chunks: list[ChunkWriter] = []

    def start(self, start: GenerationStart) -> bytes:
        """See `ResponseEncoder.start`."""
        self._head = ChunkHead(
            self.endpoint, self.prefix + start.id, start.created_s, start.model, usage=self._shown.usage
        )
        if self._shown.progress:
            self.progress(start.usage)
        return b""

    def start_choice(self, index: int, prompt: PromptDetail | None) -> bytes:
        """See `ResponseEncoder.start_choice`."""
        del prompt
        # Choices may start in any order: each when its first token is there.
        while len(self._chunks) <= index:
            self._chunks.append(ChunkWriter(self.endpoint, self._head, len(self._chunks)))
        return b""

    def progress(self, usage: TokenUsage) -> None:
        """See `ResponseEncoder.progress`."""
        self._head.set_usage(usage_of(usage))

    def end(self, result: GenerationResult) -> bytes:
        """See `ResponseEncoder.end`."""
        return (self._head.usage(usage_of(result.usage)) if self._shown.usage else b"") + DONE

    def encode_result(self, result: GenerationResult) -> bytes:
        """See `ResponseEncoder.encode_result`."""
        start = result.start
        return msgspec.json.encode(
            {
                "id": self.prefix + start.id,
                "object": self.kind,
                "created": start.created_s,
                "model": start.model,
                "choices": [self.choice(choice) for choice in result.choices],
                "usage": usage_of(result.usage),
                **self.extra(result),
            }
        )

    @abstractmethod
    def choice(self, choice: ChoiceResult) -> dict[str, Any]:
        """A whole choice."""

    def extra(self, result: GenerationResult) -> dict[str, Any]:
        """Further fields of a whole response."""
        del result
        return {}

    def prompt_fields(self, prompt: PromptDetail | None) -> dict[str, Any]:
        """Return what the client asked to see of the prompt, in vLLM's shape."""
        fields: dict[str, Any] = {}
        if prompt is not None and self._shown.token_ids:
            fields["prompt_token_ids"] = prompt.tokens
        if prompt is not None and self._shown.prompt_logprobs:
            fields["prompt_logprobs"] = self._prompt_logprobs(prompt)
        return fields

    def _prompt_logprobs(self, prompt: PromptDetail) -> list[dict[str, Any] | None]:
        """Return for each token the log probabilities by token id: its own, and those of the likeliest."""
        entries: list[dict[str, Any] | None] = []
        for token, item in zip(prompt.tokens, prompt.logprobs, strict=False):
            if item is None:
                entries.append(None)
                continue
            values = {token: item.logprob} | dict(item.top)
            ranks = {other: rank for rank, (other, _) in enumerate(item.top, 1)}
            entries.append(
                {
                    str(other): {
                        "logprob": max(value, LEAST),
                        "rank": ranks.get(other),
                        "decoded_token": self._tokenizer.text_of(other),
                    }
                    for other, value in values.items()
                }
            )
        return entries

    def token_fields(self, detail: TokenDetail | None) -> dict[str, Any]:
        """The token ids of a piece of the answer, if the client asked for them."""
        if detail is None or not self._shown.token_ids:
            return {}
        return {"token_ids": detail.tokens}


def end_fields(end: ChoiceEnd) -> dict[str, Any]:
    """Why a choice ended; `stop_reason`, as vLLM has it, names the stop string or token of the client that ended it."""
    fields: dict[str, Any] = {"finish_reason": end.reason}
    if end.stop or end.stop_token is not None:
        fields["stop_reason"] = end.stop or end.stop_token
    return fields


# /v1/chat/completions.

CHAT_PREFIX: Final = "chatcmpl-"


class ChatEncoder(OpenAiEncoder):
    """See `ResponseEncoder`."""

    endpoint = "chat"
    prefix = CHAT_PREFIX
    kind = "chat.completion"

    def start_choice(self, index: int, prompt: PromptDetail | None) -> bytes:
        """See `ResponseEncoder.start_choice`."""
        super().start_choice(index, prompt)
        return self._chunks[index].choice(
            delta={"role": "assistant", "content": ""}, **self.prompt_fields(prompt)
        )

    def text(self, index: int, text: str, detail: TokenDetail | None) -> bytes:
        """See `ResponseEncoder.text`."""
        if detail is None and not self._shown.progress:
            return self._chunks[index].text(text)
        return self._delta(index, {"content": text}, detail)

    def delta(self, index: int, event: OutputEvent, detail: TokenDetail | None) -> bytes:
        """See `ResponseEncoder.delta`."""
        match event:
            case ReasoningDelta(text):
                if not self._shown.reasoning:
                    return b""
                return self._delta(index, dict.fromkeys(self._shown.reasoning, text), detail)
            case ToolCallStart(call, name, id_):
                function = {"name": name, "arguments": ""}
                started = {"index": call, "id": id_, "type": "function", "function": function}
                return self._delta(index, {"tool_calls": [started]}, detail)
            case ToolArgumentsDelta(call, text):
                more = {"index": call, "function": {"arguments": text}}
                return self._delta(index, {"tool_calls": [more]}, detail)
        return b""

    def _delta(self, index: int, delta: dict[str, Any], detail: TokenDetail | None) -> bytes:
        return self._chunks[index].choice(
            delta=delta, logprobs=self._logprobs(detail), **self.token_fields(detail)
        )

    def end_choice(self, index: int, end: ChoiceEnd) -> bytes:
        """See `ResponseEncoder.end_choice`."""
        return self._chunks[index].choice(delta={}, **end_fields(end))

    def choice(self, choice: ChoiceResult) -> dict[str, Any]:
        """See `OpenAiEncoder.choice`."""
        # A message that only calls tools has no content, not an empty one.
        content = choice.text if choice.text or not choice.calls else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if choice.reasoning:
            message |= dict.fromkeys(self._shown.reasoning, choice.reasoning)
        if choice.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in choice.calls
            ]
        return {
            "index": choice.number,
            "message": message,
            "logprobs": self._logprobs(choice.detail),
            **end_fields(choice.end),
            **self.token_fields(choice.detail),
        }

    def extra(self, result: GenerationResult) -> dict[str, Any]:
        """See `OpenAiEncoder.extra`: all choices have the same prompt."""
        return self.prompt_fields(result.choices[0].prompt)

    def _logprobs(self, detail: TokenDetail | None) -> dict[str, Any] | None:
        if detail is None or not self._shown.logprobs:
            return None
        entries = logprob_entries(self._tokenizer, detail, as_ids=self._shown.tokens_as_ids)
        return {"content": entries, "refusal": None}


# /v1/completions.

COMPLETION_PREFIX: Final = "cmpl-"


class CompletionEncoder(OpenAiEncoder):
    """See `ResponseEncoder`."""

    endpoint = "completions"
    prefix = COMPLETION_PREFIX
    kind = "text_completion"

    def __init__(self, tokenizer: Tokenizer, shown: ShownParts) -> None:
        super().__init__(tokenizer, shown)
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def _writer(self) -> CompletionLogprobs:
        return CompletionLogprobs(self._tokenizer, as_ids=self._shown.tokens_as_ids)

    def start_choice(self, index: int, prompt: PromptDetail | None) -> bytes:
        """See `ResponseEncoder.start_choice`. With `echo` the prompt is the first text."""
        super().start_choice(index, prompt)
        self._logprobs[index] = logprobs = self._writer()
        fields = self.prompt_fields(prompt)
        echoed = prompt.text if prompt is not None and self._shown.echo else ""
        if not fields and not echoed:
            return b""
        shown = logprobs.prompt(prompt) if prompt is not None and echoed and self._shown.logprobs else None
        return self._chunks[index].choice(text=echoed, logprobs=shown, **fields)

    def text(self, index: int, text: str, detail: TokenDetail | None) -> bytes:
        """See `ResponseEncoder.text`."""
        if detail is None and not self._shown.progress:
            return self._chunks[index].text(text)
        shown = detail is not None and self._shown.logprobs
        logprobs = self._logprobs[index].answer(detail) if shown and detail is not None else None
        return self._chunks[index].choice(text=text, logprobs=logprobs, **self.token_fields(detail))

    def end_choice(self, index: int, end: ChoiceEnd) -> bytes:
        """See `ResponseEncoder.end_choice`."""
        return self._chunks[index].choice(text="", **end_fields(end))

    def choice(self, choice: ChoiceResult) -> dict[str, Any]:
        """See `OpenAiEncoder.choice`."""
        shown = self._shown
        logprobs = None
        if shown.logprobs:
            writer = self._writer()
            before = writer.prompt(choice.prompt) if shown.echo else None
            logprobs = writer.answer(choice.detail)
            if before is not None:
                logprobs = {name: before[name] + logprobs[name] for name in logprobs}
        return {
            "index": choice.number,
            "text": (choice.prompt.text if shown.echo else "") + choice.text,
            "logprobs": logprobs,
            **end_fields(choice.end),
            **self.token_fields(choice.detail),
            **self.prompt_fields(choice.prompt),
        }
