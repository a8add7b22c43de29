"""Generation's events as the responses of chat completions and of completions. Pure."""

from abc import abstractmethod
from typing import Any, Final, NamedTuple

import msgspec

from headwater.actors.edge.api.openai.chunks import DONE, ChunkHead, ChunkWriter, Endpoint, event
from headwater.actors.edge.api.openai.logprobs import CompletionLogprobs, chat_logprobs
from headwater.actors.edge.api.openai.usage import usage_of
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
from headwater.actors.edge.parsing.events import OutputEvent
from headwater.actors.http.asgi import PING
from headwater.actors.http.errors import ApiError

CHAT_PREFIX: Final = "chatcmpl-"
COMPLETION_PREFIX: Final = "cmpl-"


class ShownParts(NamedTuple):
    """What of a generation the client asked to see."""

    logprobs: bool = False
    usage: bool = False
    """A last chunk with the usage."""
    progress: bool = False
    """The usage in every chunk."""


class OpenAiEncoder:
    """What both endpoints have in common. See `ResponseEncoder`."""

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
        self._chunks.append(ChunkWriter(self.endpoint, self._head, index))
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
            }
        )

    @abstractmethod
    def choice(self, choice: ChoiceResult) -> dict[str, Any]:
        """A whole choice."""


class ChatEncoder(OpenAiEncoder):
    """Answers of /v1/chat/completions."""

    endpoint = "chat"
    prefix = CHAT_PREFIX
    kind = "chat.completion"

    def start_choice(self, index: int, prompt: PromptDetail | None) -> bytes:
        """See `ResponseEncoder.start_choice`."""
        super().start_choice(index, prompt)
        return self._chunks[index].choice(delta={"role": "assistant", "content": ""})

    def text(self, index: int, text: str, detail: TokenDetail | None) -> bytes:
        """See `ResponseEncoder.text`."""
        if detail is None and not self._shown.progress:
            return self._chunks[index].text(text)
        return self._chunks[index].choice(delta={"content": text}, logprobs=self._logprobs(detail))

    def delta(self, index: int, event: OutputEvent, detail: TokenDetail | None) -> bytes:
        """See `ResponseEncoder.delta`."""
        raise NotImplementedError

    def end_choice(self, index: int, end: ChoiceEnd) -> bytes:
        """See `ResponseEncoder.end_choice`."""
        return self._chunks[index].choice(delta={}, finish_reason=end.reason)

    def choice(self, choice: ChoiceResult) -> dict[str, Any]:
        """See `OpenAiEncoder.choice`."""
        return {
            "index": choice.number,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._logprobs(choice.detail),
            "finish_reason": choice.end.reason,
        }

    def _logprobs(self, detail: TokenDetail | None) -> dict[str, Any] | None:
        if detail is None or not self._shown.logprobs:
            return None
        return chat_logprobs(self._tokenizer, detail)


class CompletionEncoder(OpenAiEncoder):
    """Answers of /v1/completions."""

    endpoint = "completions"
    prefix = COMPLETION_PREFIX
    kind = "text_completion"

    def __init__(self, tokenizer: Tokenizer, shown: ShownParts) -> None:
        super().__init__(tokenizer, shown)
        self._logprobs: list[CompletionLogprobs] = []

    def start_choice(self, index: int, prompt: PromptDetail | None) -> bytes:
        """See `ResponseEncoder.start_choice`."""
        self._logprobs.append(CompletionLogprobs(self._tokenizer))
        return super().start_choice(index, prompt)

    def text(self, index: int, text: str, detail: TokenDetail | None) -> bytes:
        """See `ResponseEncoder.text`."""
        if detail is None and not self._shown.progress:
            return self._chunks[index].text(text)
        shown = detail is not None and self._shown.logprobs
        logprobs = self._logprobs[index].document(detail) if shown and detail is not None else None
        return self._chunks[index].choice(text=text, logprobs=logprobs)

    def delta(self, index: int, event: OutputEvent, detail: TokenDetail | None) -> bytes:
        """See `ResponseEncoder.delta`: completions have text only."""
        raise AssertionError(event)

    def end_choice(self, index: int, end: ChoiceEnd) -> bytes:
        """See `ResponseEncoder.end_choice`."""
        return self._chunks[index].choice(text="", finish_reason=end.reason)

    def choice(self, choice: ChoiceResult) -> dict[str, Any]:
        """See `OpenAiEncoder.choice`."""
        shown = self._shown.logprobs
        return {
            "index": choice.number,
            "text": choice.text,
            "logprobs": CompletionLogprobs(self._tokenizer).document(choice.detail) if shown else None,
            "finish_reason": choice.end.reason,
        }
