"""Measures how long an engine takes for prompts, and between tokens, from when requests are accepted and tokens arrive.

Engines compute prompts first come first served, in chunks, together with the requests that already generate. So the
time before a first token is one interval: it starts at the end of the interval before it, or at the end of the step
that was running when the request arrived, whichever is later. Requests whose first tokens arrive together were computed
together and make one sample. If a prompt is left over that was there when their last step began, part of it may have been
computed in that step, so the next interval joins theirs, as if all of them were one long prompt. The beginning of a step is known by the
tokens of other requests; while none generates, theirs is taken for one step.

Excluded are intervals that may contain a wait for another reason: the engine had no room (a request waited, no prompt
was being computed, and then another request ended), a request was cancelled before its first token, or the worker
changed its state.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

SAMPLES_MAX = 64
"""Samples of one report; past that, the oldest are dropped."""

TOGETHER_S = 0.001
"""First tokens within this time are of one step: an engine emits them one by one."""

DOUBTS_MAX = 64

JOINED_MAX = 8
"""Intervals that join into one sample; with an engine that computes one prompt at a time they would never stop joining."""


class PrefillMeasurements(NamedTuple):
    """What was measured since the last report: (prompt tokens, microseconds) of each sample; the mean time between tokens over `gaps`, or 0.

    Samples of prompts for which images were encoded are in `encodes` instead: see `LoadReported`.
    """

    prefills: tuple[tuple[int, int], ...] = ()
    step_us: int = 0
    gaps: int = 0
    encodes: tuple[tuple[int, int, int, int], ...] = ()


class _Prompt(msgspec.Struct):
    """A request without its first token. `began_s`: when the first step ended after it was accepted, -1 for none."""

    tokens: int
    accepted_s: float
    images: Sequence[tuple[int, int]]
    is_measurable: bool
    began_s: float = -1.0


class PrefillTimer:
    """The measurement of prompts and steps of one engine. `now` is monotonic, in seconds; `tokens` were generated before. Costs nothing per token."""

    def __init__(self, now: Callable[[], float], tokens: int = 0) -> None:
        self._now = now
        self._tokens = tokens
        self._prompts: dict[str, _Prompt] = {}
        self._fresh: list[_Prompt] = []
        self._decoding: set[str] = set()
        self._doubts: deque[tuple[float, float]] = deque(maxlen=DOUBTS_MAX)
        """(when, intervals that started before this are affected)."""
        self._samples: deque[tuple[int, int]] = deque(maxlen=SAMPLES_MAX)
        self._encodes: deque[tuple[int, int, int, int]] = deque(maxlen=SAMPLES_MAX)
        self._group: list[tuple[_Prompt, int]] = []
        self._group_s = 0.0
        self._group_step_s = 0.0
        """When the step of the present group began; -1: not known."""
        self._step_ends_s = (0.0, 0.0)
        """Ends of the last two steps."""
        self._ended_s = 0.0
        """When the interval before the present group ended."""
        self._joined = 0
        """Intervals that wait to be joined with the next; the three below describe them."""
        self._joined_s = 0.0
        self._computed = 0
        self._encoded: list[int] = []
        self._known = True
        self._firsts = 0
        self._shared_s = 0.0
        """Time between tokens up to `_step_s`, summed over all requests."""
        self._step_s = 0.0

    def add_prompt(
        self,
        request: str,
        tokens: int,
        *,
        is_measurable: bool = True,
        images: Sequence[tuple[int, int]] = (),
    ) -> None:
        """The engine has a prompt to compute; not `is_measurable` if some of its time is spent elsewhere.

        It encodes `images` for that, each with (its end in the prompt, its tokens), unless their KV is cached.
        """
        prompt = self._prompts[request] = _Prompt(tokens, self._now(), images, is_measurable)
        self._fresh.append(prompt)

    def record_step(self) -> None:
        """A step has ended and its tokens arrive. Called once for tokens that arrive together."""
        now = self._now()
        self._advance(now)
        if now - self._step_ends_s[1] > TOGETHER_S:
            self._step_ends_s = (self._step_ends_s[1], now)
        if self._fresh:
            for prompt in self._fresh:
                prompt.began_s = now
            self._fresh.clear()

    def record_first_tokens(
        self, request: str, cached: int, tokens: int = 1, *, decodes: bool = True
    ) -> None:
        """A request's first `tokens` tokens arrived; `cached` tokens of its prompt were cached (-1: unknown)."""
        now = self._now()
        if self._group and now - self._group_s > TOGETHER_S:
            self._close()
        prompt = self._prompts.pop(request, None)
        if prompt is not None:
            if not self._group:
                self._group_s, self._group_step_s = now, self._began_last_step(now)
            self._group.append((prompt, cached))
        if decodes:
            self._advance(now)
            self._decoding.add(request)
            self._firsts += tokens

    def end_request(self, request: str, running: int, waiting: int) -> None:
        """A request ended; the engine runs `running` others while `waiting` wait."""
        if request in self._decoding:
            self._advance(self._now())
            self._decoding.discard(request)
        # If all running requests have tokens already, no prompt is computed: those that wait may wait for room.
        no_room = waiting > 0 and running <= len(self._decoding)
        if self._prompts.pop(request, None) is not None:
            # To the prompts after it, its end looks like the end of a step, and is not.
            self._doubts.append((self._now(), self._now() + TOGETHER_S))
        elif no_room:
            self.mark_doubtful()

    def mark_doubtful(self) -> None:
        """What is being computed now may take longer for a reason other than its size."""
        self._doubts.append((self._now(), self._now() - TOGETHER_S))

    def take_measurements(self, tokens: int) -> PrefillMeasurements:
        """Return what was measured since the last call. `tokens`: generated so far, by all requests."""
        if self._group and self._now() - self._group_s > TOGETHER_S:
            self._close()
        samples, encodes = tuple(self._samples), tuple(self._encodes)
        self._samples.clear()
        self._encodes.clear()
        gaps = tokens - self._tokens - self._firsts
        if gaps <= 0:
            return PrefillMeasurements(samples, encodes=encodes)
        mean_us = round(self._shared_s / gaps * 1e6)
        self._tokens, self._firsts, self._shared_s = tokens, 0, 0.0
        return PrefillMeasurements(samples, mean_us, gaps, encodes)

    def _began_last_step(self, now: float) -> float:
        """Return when the step that ends now began; -1 if no request generates that would show it."""
        if not self._decoding:
            return -1.0
        before, last = self._step_ends_s
        return before if now - last <= TOGETHER_S else last

    def _advance(self, now: float) -> None:
        """Add the time since the last step, once for each request that generates."""
        self._shared_s += len(self._decoding) * (now - self._step_s)
        self._step_s = now

    def _close(self) -> None:
        """First tokens that arrived together end an interval, which becomes a sample unless it is excluded."""
        group, self._group = self._group, []
        at_s, before_s, self._ended_s = self._group_s, self._ended_s, self._group_s
        began_s = max(before_s, min(_began(prompt, at_s) for prompt, _ in group))
        if not self._joined:
            self._joined_s, self._computed, self._known = began_s, 0, True
            self._encoded = []
        self._computed += sum(prompt.tokens - cached for prompt, cached in group)
        self._encoded += [size for prompt, cached in group for end, size in prompt.images if end > cached]
        self._known &= all(cached >= 0 and prompt.is_measurable for prompt, cached in group)
        next_prompt = next(iter(self._prompts.values()), None)
        step_s = self._group_step_s if self._group_step_s >= 0 else began_s
        if next_prompt is not None and next_prompt.accepted_s <= step_s and self._joined < JOINED_MAX:
            self._joined += 1
            return
        self._joined = 0
        doubtful = any(self._joined_s < began and at < at_s - TOGETHER_S for at, began in self._doubts)
        while self._doubts and self._doubts[0][0] <= at_s - TOGETHER_S:
            self._doubts.popleft()
        elapsed_us = round((at_s - self._joined_s) * 1e6)
        if not self._known or doubtful or elapsed_us <= 0 or self._computed <= 0:
            return
        if self._encoded:
            self._encodes.append((self._computed, len(self._encoded), sum(self._encoded), elapsed_us))
        else:
            self._samples.append((self._computed, elapsed_us))


def _began(prompt: _Prompt, first_s: float) -> float:
    """Return when the engine could start on it; the step that ends with its own first token does not count."""
    return prompt.began_s if 0 <= prompt.began_s < first_s - TOGETHER_S else prompt.accepted_s
