"""One choice's answer as text: incremental decoding and stop strings. Pure."""

from headwater.actors.edge.model.tokenizer import Decoder


class StopStringMatcher:
    """Turns tokens into text deltas; withholds text that may be the start of a stop string.

    `keep`: the stop string that ends the text is part of it.
    """

    __slots__ = ("_decoder", "_held", "_keep", "_stops", "matched", "stopped")

    def __init__(self, decoder: Decoder, stops: list[str], *, keep: bool = False) -> None:
        self._decoder = decoder
        self._stops = stops
        self._held = ""
        self._keep = keep
        self.stopped = False
        self.matched = ""
        """The stop string that ended the text."""

    def push(self, tokens: tuple[int, ...]) -> str:
        """Text that can be emitted now. Sets `stopped` once a stop string is complete; no text follows."""
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
