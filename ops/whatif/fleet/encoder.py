"""An encode worker on virtual time: one image after the other, and a cache of embeddings, as the simulated engine has it."""

from collections.abc import Callable

from headwater.engines.embeddings.cache import EmbeddingCache
from headwater.engines.engine import EncodedImage, KvEvent
from headwater.schemas.events.load import LoadReported
from headwater.schemas.messages.media import PromptMedia

_NOTHING = EncodedImage(None, "float32")
"""Embeddings have no values here."""


class VirtualEncoder:
    """Keeps up to `blocks` blocks of embeddings. `encode_ns` is the time for an image of so many tokens.

    `computed` counts the images that it encoded, `found` those that it had, or was encoding, for another request.
    """

    def __init__(self, name: str, block_size: int, blocks: int, encode_ns: Callable[[int], int]) -> None:
        self.name = name
        self.blocks = blocks
        self.computed = self.found = 0
        self._encode_ns = encode_ns
        self._cache = EmbeddingCache(block_size, blocks)
        self._running: dict[str, tuple[int, int]] = {}
        """By image: when it will be encoded, and its tokens."""
        self._accepted: list[str] = []
        self._ended: list[tuple[str, int]] = []
        self._measured: list[tuple[int, int]] = []

    def ahead(self, item: PromptMedia) -> int:
        """Tokens of images that are encoded before this one; 0 if it is at hand, or one of them."""
        if item.id in self._running or self._cache.find(item) is not None:
            return 0
        return sum(tokens for _, tokens in self._running.values())

    def accept(self, leg: str, item: PromptMedia, now_ns: int) -> int:
        """An image is to be encoded for the decision `leg`: returns when its embedding is there."""
        self._accepted.append(leg)
        if item.id in self._running:
            self.found += 1
            return self._running[item.id][0]
        if self._cache.find(item) is not None:
            self.found += 1
            return now_ns
        self.computed += 1
        took_ns = self._encode_ns(item.tokens)
        end_ns = max([now_ns, *(end_ns for end_ns, _ in self._running.values())]) + took_ns
        self._running[item.id] = end_ns, item.tokens
        self._measured.append((item.tokens, took_ns // 1000))
        return end_ns

    def decline(self, leg: str) -> None:
        """The serving worker is the better one: what the router counted for the decision ends."""
        self._accepted.append(leg)
        self._ended.append((leg, -1))

    def finish(self, leg: str, item: PromptMedia, now_ns: int) -> None:
        """The embedding is there."""
        running = self._running.get(item.id)
        if running is not None and running[0] <= now_ns:
            del self._running[item.id]
            self._cache.keep(item, _NOTHING)
        self._ended.append((leg, 0))

    def take_events(self) -> list[KvEvent]:
        """What was kept and dropped since the last call."""
        events = self._cache.events
        return [events.get_nowait() for _ in range(events.qsize())]

    def report(self) -> LoadReported:
        """The load report of this worker."""
        prefilled = [leg for leg, cached in self._ended if cached >= 0]
        report = LoadReported(
            running=len(self._running),
            waiting=0,
            used_blocks=self._cache.used_blocks,
            total_blocks=self.blocks,
            accepted=tuple(self._accepted),
            prefilled=tuple(prefilled),
            finished=tuple([leg for leg, _ in self._ended]),
            cached=(0,) * len(prefilled),
            prefills=tuple(self._measured),
        )
        self._accepted, self._ended, self._measured = [], [], []
        return report
