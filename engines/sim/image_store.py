"""The image embeddings that a simulated engine has at hand: those it computed, and those that encode workers computed for it."""

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from headwater.engines.engine import EngineError

COMPUTED_HERE = -1


class _HeldImage(NamedTuple):
    tokens: int
    content: int
    until_s: float


class ImageStore:
    """Up to `tokens_max` tokens, the least recently used image dropped first.

    One that was given is not dropped before a request has used it, or `linger_s` seconds have passed: a request whose image was found
    here comes within that time. `now` is monotonic, in seconds.
    """

    def __init__(self, tokens_max: int, now: Callable[[], float], linger_s: float = 0.0) -> None:
        self.tokens = 0
        self._tokens_max = tokens_max
        self._now = now
        self._linger_s = linger_s
        self._held: OrderedDict[str, _HeldImage] = OrderedDict()

    def __len__(self) -> int:
        """Images at hand."""
        return len(self._held)

    def __contains__(self, image: str) -> bool:
        """Is it here? Nothing is promised."""
        return image in self._held

    @property
    def pinned(self) -> int:
        """Images that were given and may not be dropped yet."""
        now_s = self._now()
        return sum(held.until_s > now_s for held in self._held.values())

    def content(self, image: str) -> int | None:
        """What was given with an image, which a request is about to use. None if it is not here."""
        held = self._held.get(image)
        if held is None:
            return None
        if held.content != COMPUTED_HERE:
            self._set(image, held._replace(until_s=self._now() + self._linger_s))
        return held.content

    def use(self, image: str) -> bool:
        """A request uses an image, if it is here."""
        held = self._held.get(image)
        if held is None:
            return False
        self._set(image, held._replace(until_s=0.0))
        return True

    def _set(self, image: str, held: _HeldImage) -> None:
        self._held[image] = held
        self._held.move_to_end(image)

    def keep(self, image: str, tokens: int, content: int = COMPUTED_HERE) -> bool:
        """Add an embedding of `tokens` tokens, computed here or given with its `content`. False: there is no room for it."""
        now_s = self._now()
        until_s = now_s + self._linger_s if content != COMPUTED_HERE else 0.0
        known = self._held.get(image)
        if known is not None:
            self._set(
                image, _HeldImage(known.tokens, max(known.content, content), max(known.until_s, until_s))
            )
            return True
        self._make_room(tokens, now_s)
        if self.tokens + tokens > self._tokens_max:
            return False
        self._held[image] = _HeldImage(tokens, content, until_s)
        self.tokens += tokens
        return True

    def _make_room(self, tokens: int, now_s: float) -> None:
        for image, held in list(self._held.items()):
            if self.tokens + tokens <= self._tokens_max:
                return
            if held.until_s <= now_s:
                self.tokens -= self._held.pop(image).tokens


class NoRoomForImage(EngineError):
    """All embeddings that are here are in use."""
