"""Generation's events as responses of /v1/completions. Pure."""

from typing import Any, Final

from headwater.actors.edge.api.openai.encoder import OpenAiEncoder, end_fields
from headwater.actors.edge.api.openai.logprobs import CompletionLogprobs
from headwater.actors.edge.api.openai.shown import ShownParts
from headwater.actors.edge.generation.events import ChoiceEnd, ChoiceResult, PromptDetail, TokenDetail
from headwater.actors.edge.model.tokenizer import Tokenizer
from headwater.actors.edge.parsing.events import OutputEvent

COMPLETION_PREFIX: Final = "cmpl-"


class CompletionEncoder(OpenAiEncoder):
    """See `ResponseEncoder`."""

    endpoint = "completions"
    prefix = COMPLETION_PREFIX
    kind = "text_completion"

    def __init__(self, tokenizer: Tokenizer, shown: ShownParts) -> None:
        super().__init__(tokenizer, shown)
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def start_choice(self, index: int, prompt: PromptDetail | None) -> bytes:
        """See `ResponseEncoder.start_choice`. With `echo` the prompt is the first text."""
        super().start_choice(index, prompt)
        self._logprobs[index] = logprobs = CompletionLogprobs(self._tokenizer)
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

    def delta(self, index: int, event: OutputEvent, detail: TokenDetail | None) -> bytes:
        """See `ResponseEncoder.delta`: completions have text only."""
        raise AssertionError(event)

    def end_choice(self, index: int, end: ChoiceEnd) -> bytes:
        """See `ResponseEncoder.end_choice`."""
        return self._chunks[index].choice(text="", **end_fields(end))

    def choice(self, choice: ChoiceResult) -> dict[str, Any]:
        """See `OpenAiEncoder.choice`."""
        shown = self._shown
        logprobs = None
        if shown.logprobs:
            writer = CompletionLogprobs(self._tokenizer)
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
