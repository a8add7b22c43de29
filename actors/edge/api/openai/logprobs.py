"""Log probabilities in the two shapes of OpenAI's API. Pure."""

from collections.abc import Iterable
from typing import Any, Final

from headwater.actors.edge.generation.events import TokenDetail
from headwater.actors.edge.model.tokenizer import Tokenizer

LEAST: Final = -9999.0
"""JSON has no minus infinity; OpenAI uses this."""


def chat_logprobs(tokenizer: Tokenizer, detail: TokenDetail) -> dict[str, Any]:
    """The shape of chat completions."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": tokenizer.text_of(token),
            "logprob": max(logprob, LEAST),
            "bytes": list(tokenizer.bytes_of(token)),
        }

    content = [
        {**entry(token, item.logprob), "top_logprobs": [entry(other, value) for other, value in item.top]}
        for token, item in zip(detail.tokens, detail.logprobs, strict=False)
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """The shape of completions. Offsets count from the beginning of the choice's text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.offset = 0
        """Length of the text before the next tokens."""

    def document(self, detail: TokenDetail) -> dict[str, Any]:
        """The log probabilities of these tokens, which follow those of the call before."""
        tokenizer = self._tokenizer
        names = [tokenizer.text_of(token) for token in detail.tokens]
        return {
            "tokens": names,
            "token_logprobs": [max(item.logprob, LEAST) for item in detail.logprobs],
            "top_logprobs": [
                {tokenizer.text_of(other): max(value, LEAST) for other, value in item.top}
                for item in detail.logprobs
            ],
            "text_offset": self._offsets(names),
        }

    def _offsets(self, names: Iterable[str]) -> list[int]:
        found: list[int] = []
        for name in names:
            found.append(self.offset)
            self.offset += len(name)
        return found
