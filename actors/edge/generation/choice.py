"""One choice on its way to the client: tokens to text to an encoder's bytes."""

from headwater.actors.edge.generation.encoder import ResponseEncoder
from headwater.actors.edge.generation.events import ChoiceEnd, ChoiceResult, PromptDetail, TokenDetail
from headwater.actors.edge.model.stop_strings import StopStringMatcher
from headwater.schemas.messages.inference import TokenLogprob


class ChoiceWriter:
    """Collects one choice that is nothing but text. With an encoder, of a stream, each piece is translated at once.

    `detailed`: the client asked for tokens or log probabilities.
    """

    __slots__ = (
        "_detailed", "_encoder", "_index", "_logprobs", "_matcher", "_parts", "_tokens", "first_token_s",
        "prompt", "reasoning_tokens",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        matcher: StopStringMatcher,
        encoder: ResponseEncoder | None,
        *,
        detailed: bool = False,
    ) -> None:
        self.first_token_s = 0.0
        self.reasoning_tokens = 0
        """Tokens of reasoning so far, with the marker that ends it."""
        self.prompt: PromptDetail | None = None
        self._index = index
        self._matcher = matcher
        self._encoder = encoder
        self._detailed = detailed
        self._parts: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    @property
    def stopped(self) -> bool:
        """Whether its text contains a stop string."""
        return self._matcher.stopped

    def push(self, tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]) -> tuple[str, bytes]:
        """The text of new tokens, and what to send for it."""
        text = self._matcher.push(tokens)
        if self._detailed:
            self._tokens += tokens
            self._logprobs += logprobs
            self._parts.append(text)
            return text, self._encode(text, TokenDetail(tokens, logprobs))
        if not text:
            return "", b""
        self._parts.append(text)
        return text, self._encoder.text(self._index, text, None) if self._encoder is not None else b""

    def finish(self) -> tuple[str, bytes]:
        """The text that was withheld until the choice ended, and what to send for it."""
        rest = "" if self._matcher.stopped else self._matcher.flush()
        if not rest:
            return "", b""
        self._parts.append(rest)
        return rest, self._encode(rest, None)

    def end(self, reason: str) -> ChoiceEnd:
        """How the choice ended. `reason` is the saga's: stop or length."""
        matcher = self._matcher
        return ChoiceEnd("length" if reason == "length" else "stop", matcher.matched, matcher.stop_token)

    def result(self, number: int, prompt_index: int, end: ChoiceEnd) -> ChoiceResult:
        """The whole choice."""
        return ChoiceResult(
            number=number,
            prompt_index=prompt_index,
            text="".join(self._parts),
            reasoning="",
            calls=(),
            end=end,
            detail=TokenDetail(tuple(self._tokens), tuple(self._logprobs)),
            prompt=self.prompt or PromptDetail(),
        )

    def mean_logprob(self) -> float:
        """The mean log probability of its tokens; 0 without any."""
        return sum(item.logprob for item in self._logprobs) / max(1, len(self._logprobs))

    def _encode(self, text: str, detail: TokenDetail | None) -> bytes:
        return self._encoder.text(self._index, text, detail) if self._encoder is not None else b""
