"""Generation's events as responses of /v1/chat/completions. Pure."""

from typing import Any, Final

from headwater.actors.edge.api.openai.encoder import OpenAiEncoder, end_fields
from headwater.actors.edge.api.openai.logprobs import chat_logprobs
from headwater.actors.edge.generation.events import (
    ChoiceEnd,
    ChoiceResult,
    GenerationResult,
    PromptDetail,
    TokenDetail,
)
from headwater.actors.edge.parsing.events import (
    OutputEvent,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallStart,
)

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
        return chat_logprobs(self._tokenizer, detail)
