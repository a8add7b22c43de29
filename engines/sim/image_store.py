"""The image embeddings that a simulated engine has at hand: those it computed, and those that encode workers computed for it."""

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from headwater.engines.engine import EngineError


class _HeldImage(NamedTuple):
    tokens: int
    content: int
    used_s: float


class ImageStore:
    """Up to `tokens_max` tokens, the least recently used image dropped first, but none that was used in the last `linger_s` seconds.

    `now` is monotonic, in seconds. A request whose image was found here comes within that time.
    """

    def __init__(self, tokens_max: int, now: Callable[[], float], linger_s: float = 0.0) -> None:
        self.tokens = 0
        self.dropped = 0
        """Images dropped so far."""
        self._tokens_max = tokens_max
        self._now = now
        self._linger_s = linger_s
        self._held: OrderedDict[str, _HeldImage] = OrderedDict()

    def __len__(self) -> int:
        """Images at hand."""
        return len(self._held)

    def holds(self, image: str) -> bool:
        """Is the embedding of this image at hand? Its stay is prolonged."""
        return self.content(image) is not None

    def content(self, image: str) -> int | None:
        """What was kept with an image: its stay is prolonged. None if it is not here."""
        held = self._held.get(image)
        if held is None:
            return None
        self._held[image] = held._replace(used_s=self._now())
        self._held.move_to_end(image)
        return held.content

    def keep(self, image: str, tokens: int, content: int = -1) -> bool:
        """Add an embedding of `tokens` tokens. False: there is no room for it. `content` is -1 for one that was computed here."""
        now_s = self._now()
        known = self._held.get(image)
        if known is not None:
            self._held[image] = _HeldImage(known.tokens, max(known.content, content), now_s)
            return True
        while self._held and self.tokens + tokens > self._tokens_max:
            oldest = next(iter(self._held))
            if self._held[oldest].used_s + self._linger_s > now_s:
                break
            self.tokens -= self._held.pop(oldest).tokens
            self.dropped += 1
        if self.tokens + tokens > self._tokens_max:
            return False
        self._held[image] = _HeldImage(tokens, content, now_s)
        self.tokens += tokens
        return True


class NoRoomForImage(EngineError):
    """All embeddings that are here are in use."""
