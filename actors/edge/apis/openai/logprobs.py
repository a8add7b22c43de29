"""Log probabilities in the two shapes of OpenAI's API. Pure.

With `as_ids` tokens are named `token_id:ID` as vLLM does it, so that tokens of equal text can be told apart.
"""

import codecs
from collections.abc import Callable, Sequence
from typing import Any, Final

from headwater.actors.edge.model.tokenizer import Tokenizer
from headwater.actors.edge.prompt.request import PromptDetail, TokenDetail
from headwater.schemas.messages.inference import TokenLogprob

LEAST: Final = -9999.0
"""JSON has no minus infinity; OpenAI uses this."""


def _names(tokenizer: Tokenizer, *, as_ids: bool) -> Callable[[int], str]:
    """Return what names a token: its text, or its id."""
    return (lambda token: f"token_id:{token}") if as_ids else tokenizer.text_of


def chat_logprobs(tokenizer: Tokenizer, detail: TokenDetail, *, as_ids: bool = False) -> dict[str, Any]:
    """The shape of chat completions."""
    name = _names(tokenizer, as_ids=as_ids)

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": name(token),
            "logprob": max(logprob, LEAST),
            "bytes": list(tokenizer.bytes_of(token)),
        }

    content = [
        {**entry(token, item.logprob), "top_logprobs": [entry(other, value) for other, value in item.top]}
        for token, item in zip(detail.tokens, detail.logprobs, strict=False)
    ]
    return {"content": content, "refusal": None}


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
        found: dict[str, float] = {}
        for other, value in (*item.top, (token, item.logprob)):
            name = self._name(other)
            found[name] = max(found.get(name, LEAST), value, LEAST)
        return found

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
