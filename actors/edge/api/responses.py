"""OpenAI's response shapes, as bytes. A stream's chunk is a prepared prefix, the text as JSON, and a suffix."""

from typing import Any, Literal

import msgspec

from headwater.actors.edge.model.tokenizer import Tokenizer
from headwater.schemas.messages.inference import TokenLogprob

Endpoint = Literal["chat", "completions"]

_json = msgspec.json.encode
DONE = b"data: [DONE]\n\n"


class Usage(msgspec.Struct):
    """Token counts, as OpenAI names them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
    """Usage of a request; `cached_tokens` as the engine reported it."""
    return Usage(
        prompt_tokens,
        completion_tokens,
        prompt_tokens + completion_tokens,
        {"cached_tokens": max(0, cached_tokens)},
    )


def event(document: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + _json(document) + b"\n\n"


class ChunkWriter:
    """Encodes the chunks of one choice. Everything but the text is encoded once."""

    def __init__(
        self, endpoint: Endpoint, request: str, created_s: int, model: str, index: int, include_usage: bool
    ) -> None:
        chat = endpoint == "chat"
        kind = "chat.completion.chunk" if chat else "text_completion"
        head = {"id": request, "object": kind, "created": created_s, "model": model}
        self._head = b"data: " + _json(head)[:-1] + b',"choices":[{"index":%d,' % index
        self._text = self._head + (b'"delta":{"content":' if chat else b'"text":')
        self._close = b"}" if chat else b""
        tail = b',"usage":null' if include_usage else b""
        self._end = b"}]" + tail + b"}\n\n"
        self._plain_end = self._close + b',"logprobs":null,"finish_reason":null' + self._end
        self._chat = chat

    def role(self) -> bytes:
        """The first chunk of a chat choice."""
        if not self._chat:
            return b""
        start = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        return self._head + start + self._end

    def text(self, text: str, logprobs: Any = None) -> bytes:
        """A chunk with new text."""
        if logprobs is None:
            return self._text + _json(text) + self._plain_end
        rest = b',"logprobs":' + _json(logprobs) + b',"finish_reason":null'
        return self._text + _json(text) + self._close + rest + self._end

    def finish(self, reason: str) -> bytes:
        """The last chunk of the choice."""
        body = b'"delta":{}' if self._chat else b'"text":""'
        return self._head + body + b',"logprobs":null,"finish_reason":' + _json(reason) + self._end


def usage_chunk(endpoint: Endpoint, request: str, created_s: int, model: str, counts: Usage) -> bytes:
    """The chunk with the usage, before [DONE]."""
    kind = "chat.completion.chunk" if endpoint == "chat" else "text_completion"
    return event(
        {"id": request, "object": kind, "created": created_s, "model": model, "choices": [], "usage": counts}
    )


def chat_logprobs(
    tokenizer: Tokenizer, tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]
) -> dict[str, Any]:
    """Log probabilities in the shape of chat completions."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": tokenizer.text_of(token),
            "logprob": max(logprob, -9999.0),
            "bytes": list(tokenizer.bytes_of(token)),
        }

    content = [
        {**entry(token, item.logprob), "top_logprobs": [entry(other, value) for other, value in item.top]}
        for token, item in zip(tokens, logprobs, strict=False)
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: Tokenizer, tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...], offset: int
) -> dict[str, Any]:
    """Log probabilities in the shape of completions; `offset` is the text's length before these tokens."""
    names = [tokenizer.text_of(token) for token in tokens]
    offsets: list[int] = []
    for name in names:
        offsets.append(offset)
        offset += len(name)
    return {
        "tokens": names,
        "token_logprobs": [max(item.logprob, -9999.0) for item in logprobs],
        "top_logprobs": [
            {tokenizer.text_of(other): max(value, -9999.0) for other, value in item.top} for item in logprobs
        ],
        "text_offset": offsets,
    }


def whole(
    endpoint: Endpoint,
    request: str,
    created_s: int,
    model: str,
    choices: list[dict[str, Any]],
    counts: Usage,
) -> bytes:
    """A response that is not streamed."""
    kind = "chat.completion" if endpoint == "chat" else "text_completion"
    return _json(
        {
            "id": request,
            "object": kind,
            "created": created_s,
            "model": model,
            "choices": choices,
            "usage": counts,
        }
    )
