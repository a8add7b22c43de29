"""One choice's answer as text: incremental decoding, stop strings and stop tokens. Pure."""

from typing import Final

from headwater.actors.edge.model.tokenizer import Decoder

NO_TOKENS: Final[frozenset[int]] = frozenset()


class StopStringMatcher:
    """Turns tokens into text deltas; withholds text that may be the start of a stop string.

    `keep`: the stop string, or the text of the stop token, that ends the text is part of it. A token of `stop_tokens` is
    the last one, as the engine ends with it; its text is left out, as in vLLM.
    """

    __slots__ = ("_decoder", "_held", "_keep", "_stop_tokens", "_stops", "matched", "stop_token", "stopped")

    def __init__(
        self,
        decoder: Decoder,
        stops: list[str],
        *,
        keep: bool = False,
        stop_tokens: frozenset[int] = NO_TOKENS,
    ) -> None:
        self._decoder = decoder
        self._stops = stops
        self._held = ""
        self._keep = keep
        self.stopped = False
        self.matched = ""
        """The stop string that ended the text."""
        self._stop_tokens = stop_tokens
        self.stop_token: int | None = None
        """The stop token that ended the text."""

    def push(self, tokens: tuple[int, ...]) -> str:
        """Text that can be emitted now. Sets `stopped` once a stop string is complete; no text follows."""
        if self._stop_tokens and tokens and tokens[-1] in self._stop_tokens:
            self.stop_token = tokens[-1]
            if not self._keep:
                tokens = tokens[:-1]
        text = self._decoder.push(tokens)
        return self._show(text) if self._stops else text

    def flush(self) -> str:
        """The withheld text, when the answer ended without a stop string."""
        text = self._decoder.flush()
        if not self._stops:
            return text
        shown = self._show(text)
        if self.stopped:
            return shown
        rest, self._held = self._held, ""
        return shown + rest

    def _show(self, text: str) -> str:
        if self.stopped:
            return ""
        held = self._held + text
        # The stop string that is complete first counts; of two that end together, the longer.
        ends = [(at + len(stop), at) for stop in self._stops if (at := held.find(stop)) >= 0]
        if ends:
            self.stopped = True
            self._held = ""
            end, begin = min(ends)
            self.matched = held[begin:end]
            return held[: end if self._keep else begin]
        keep = max(_overlap(held, stop) for stop in self._stops)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a prefix of `stop`."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
