"""How long an engine takes for prompts, and from one token to the next, read off when requests begin and when tokens come.

Engines compute prompts first come first served, in chunks, beside the requests that generate already. So what happens
before a first token is one stretch: it begins where the stretch before it ended, or when the request was there and the
step under way then was over, if that is later. Requests whose first tokens come together were computed together, and
make one sample. Where a prompt was left over that could have begun with them, part of it may have been computed with
them, so the next stretch joins theirs, as if all were one long prompt.

Not measured is what may have stood still for another reason: where an engine had no room (a request waited, no prompt was
being computed, and then another one ended), where a request was cancelled before its first token, or a worker changed its state.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

SAMPLES_MAX = 64
"""Samples of one report; with more, the oldest are left out."""

TOGETHER_S = 0.001
"""First tokens that come within this time are of one step: the adapters hand them over one by one."""

DOUBTS_MAX = 64

JOINED_MAX = 8
"""Stretches that join one sample; engines that compute one prompt at a time would join for ever."""


class Measured(NamedTuple):
    """Since the last report: (prompt tokens computed, microseconds), and the mean time between tokens, 0 without any."""

    prefills: tuple[tuple[int, int], ...] = ()
    step_us: int = 0


class _Prompt:
    """A request without its first token. `began_s`: the end of the first step that ended while it was there."""

    __slots__ = ("accepted_s", "began_s", "counts", "tokens")

    def __init__(self, tokens: int, accepted_s: float, *, counts: bool) -> None:
        self.tokens = tokens
        self.accepted_s = accepted_s
        self.began_s = -1.0
        self.counts = counts


class PrefillClock:
    """See the module. `now` is monotonic, in seconds; `tokens` came before. A token costs nothing here, a step little."""

    def __init__(self, now: Callable[[], float], tokens: int = 0) -> None:
        self._now = now
        self._tokens = tokens
        self._prompts: dict[str, _Prompt] = {}
        self._fresh: list[_Prompt] = []
        self._decoding: set[str] = set()
        self._doubts: deque[tuple[float, float]] = deque(maxlen=DOUBTS_MAX)
        """Each with the last beginning of a stretch that it is about."""
        self._samples: deque[tuple[int, int]] = deque(maxlen=SAMPLES_MAX)
        self._group: list[tuple[_Prompt, int]] = []
        self._group_s = 0.0
        self._ended_s = 0.0
        """When the stretch before the present group ended."""
        self._joined = 0
        """Stretches that wait for the next one to join them, with the three below."""
        self._joined_s = 0.0
        self._computed = 0
        self._known = True
        self._firsts = 0
        self._shared_s = 0.0
        """Time between tokens, of all requests together, up to `_step_s`."""
        self._step_s = 0.0

    def accepted(self, request: str, tokens: int, *, counts: bool = True) -> None:
        """The engine has a prompt to compute. Without `counts` its time is not all the engine's."""
        prompt = self._prompts[request] = _Prompt(tokens, self._now(), counts=counts)
        self._fresh.append(prompt)

    def stepped(self) -> None:
        """A step is over, tokens come. Called once for several tokens that come at once."""
        now = self._now()
        self._advance(now)
        if self._fresh:
            for prompt in self._fresh:
                prompt.began_s = now
            self._fresh.clear()

    def first(self, request: str, cached: int, tokens: int = 1, *, decodes: bool = True) -> None:
        """A request's first `tokens` tokens came, of its prompt `cached` were there already (-1: who knows)."""
        now = self._now()
        if decodes:
            self._advance(now)
            self._decoding.add(request)
            self._firsts += tokens
        prompt = self._prompts.pop(request, None)
        if prompt is None:
            return
        if self._group and now - self._group_s > TOGETHER_S:
            self._close()
        if not self._group:
            self._group_s = now
        self._group.append((prompt, cached))

    def ended(self, request: str, running: int, waiting: int) -> None:
        """A request is over, and the engine works on `running` others while `waiting` have to wait."""
        if request in self._decoding:
            self._advance(self._now())
            self._decoding.discard(request)
        # Where all that run have tokens already, no prompt is computed: what waits may have waited for room.
        no_room = waiting > 0 and running <= len(self._decoding)
        if self._prompts.pop(request, None) is not None:
            # Its end looks like the end of a step to those that wait behind it, and is not.
            self._doubts.append((self._now(), self._now() + TOGETHER_S))
        elif no_room:
            self.doubt()

    def doubt(self) -> None:
        """What is computed at this moment may take longer for a reason that is not its size."""
        self._doubts.append((self._now(), self._now() - TOGETHER_S))

    def take(self, tokens: int) -> Measured:
        """What was measured since the last call. `tokens` is how many came in all, of all requests, so far."""
        if self._group and self._now() - self._group_s > TOGETHER_S:
            self._close()
        samples = tuple(self._samples)
        self._samples.clear()
        gaps = tokens - self._tokens - self._firsts
        if gaps <= 0:
            return Measured(samples)
        mean_us = round(self._shared_s / gaps * 1e6)
        self._tokens, self._firsts, self._shared_s = tokens, 0, 0.0
        return Measured(samples, mean_us)

    def _advance(self, now: float) -> None:
        """Account for the time until now, in which so many requests generated."""
        self._shared_s += len(self._decoding) * (now - self._step_s)
        self._step_s = now

    def _close(self) -> None:
        """First tokens that came together end a stretch, and are a sample unless something speaks against it."""
        group, self._group = self._group, []
        at_s, before_s, self._ended_s = self._group_s, self._ended_s, self._group_s
        began_s = max(before_s, min(_began(prompt, at_s) for prompt, _ in group))
        if not self._joined:
            self._joined_s, self._computed, self._known = began_s, 0, True
        self._computed += sum(prompt.tokens - cached for prompt, cached in group)
        self._known &= all(cached >= 0 and prompt.counts for prompt, cached in group)
        left = next(iter(self._prompts.values()), None)
        if left is not None and _began(left, at_s) <= began_s and self._joined < JOINED_MAX:
            self._joined += 1
            return
        self._joined = 0
        doubtful = any(self._joined_s < began and at < at_s - TOGETHER_S for at, began in self._doubts)
        while self._doubts and self._doubts[0][0] <= at_s - TOGETHER_S:
            self._doubts.popleft()
        elapsed_us = round((at_s - self._joined_s) * 1e6)
        if self._known and not doubtful and elapsed_us > 0 and self._computed > 0:
            self._samples.append((self._computed, elapsed_us))


def _began(prompt: _Prompt, first_s: float) -> float:
    """When the engine could begin with it; the step that ends with its own first token is not one before it."""
    return prompt.began_s if 0 <= prompt.began_s < first_s - TOGETHER_S else prompt.accepted_s
