"""What the responses of chat completions and completions have in common. Pure."""

from abc import abstractmethod
from typing import Any, Final

import msgspec

from headwater.actors.edge.api.openai.chunks import DONE, ChunkHead, ChunkWriter, Endpoint, event
from headwater.actors.edge.api.openai.shown import ShownParts
from headwater.actors.edge.generation.events import (
    ChoiceEnd,
    ChoiceResult,
    GenerationResult,
    GenerationStart,
    PromptDetail,
    TokenDetail,
    TokenUsage,
)
from headwater.actors.edge.model.tokenizer import Tokenizer
from headwater.actors.http.asgi import PING
from headwater.actors.http.errors import ApiError


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


class OpenAiEncoder:
    """See `ResponseEncoder`."""

    endpoint: Endpoint
    prefix: str
    kind: str

    def __init__(self, tokenizer: Tokenizer, shown: ShownParts) -> None:
        self._tokenizer = tokenizer
        self._shown = shown
        self._chunks: list[ChunkWriter] = []

    @property
    def wants_progress(self) -> bool:
        """See `ResponseEncoder.wants_progress`."""
        return self._shown.progress

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

    def fail(self, error: ApiError) -> bytes:
        """See `ResponseEncoder.fail`: no [DONE] follows."""
        return event(error.document())

    def ping(self) -> bytes:
        """See `ResponseEncoder.ping`."""
        return PING

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
        """What the client asked to see of the prompt, in vLLM's shape."""
        fields: dict[str, Any] = {}
        if prompt is not None and self._shown.token_ids:
            fields["prompt_token_ids"] = prompt.tokens
        if prompt is not None and self._shown.prompt_logprobs:
            fields["prompt_logprobs"] = self._prompt_logprobs(prompt)
        return fields

    def _prompt_logprobs(self, prompt: PromptDetail) -> list[dict[str, Any] | None]:
        """Per token the log probabilities by token id: its own, and those of the likeliest."""
        found: list[dict[str, Any] | None] = []
        for token, item in zip(prompt.tokens, prompt.logprobs, strict=False):
            if item is None:
                found.append(None)
                continue
            values = {token: item.logprob} | dict(item.top)
            ranks = {other: rank for rank, (other, _) in enumerate(item.top, 1)}
            found.append(
                {
                    str(other): {
                        "logprob": max(value, -9999.0),
                        "rank": ranks.get(other),
                        "decoded_token": self._tokenizer.text_of(other),
                    }
                    for other, value in values.items()
                }
            )
        return found

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
