"""How a worker's requests get on, for its next report to the log, and what that says of the engine's speed."""

import asyncio
from typing import NamedTuple, Protocol

from headwater.actors.prefill_clock import PrefillClock
from headwater.engines.engine import EngineLoad, Step
from headwater.schemas.clock import Clock
from headwater.schemas.inference import GenerateRequest

_TOKEN_BYTES = 4


class Progress(NamedTuple):
    """Since the last report: see `LoadReported`, whose last fields these are."""

    accepted: tuple[str, ...] = ()
    prefilled: tuple[str, ...] = ()
    finished: tuple[str, ...] = ()
    cached: tuple[int, ...] = ()
    prefills: tuple[tuple[int, int], ...] = ()
    step_us: int = 0


class Loaded(Protocol):
    """What is asked of an engine here."""

    def load(self) -> EngineLoad:
        """See `Engine.load`."""
        ...

    def waits(self, request: str) -> bool:
        """Is a request taken, and not with the engine yet?"""
        ...


class Tracker:
    """One life's requests. `moved` is set when there is something to report; `tokens` came before this life."""

    def __init__(self, clock: Clock, engine: Loaded, moved: asyncio.Event, tokens: int) -> None:
        self.accepted: list[str] = []
        self.prefilled: list[str] = []
        self.finished: list[str] = []
        self.clock = PrefillClock(clock.monotonic_s, tokens)
        self._cached: list[int] = []
        self._engine = engine
        self._moved = moved

    def accept(self, request: GenerateRequest, *, fetches: bool) -> None:
        """The engine has it now. One that `fetches` its KV computes no prompt."""
        self.accepted.append(request.request)
        self._moved.set()
        if not fetches:
            alone = not self._engine.waits(request.request)
            self.clock.accepted(request.request, len(request.tokens) // _TOKEN_BYTES, counts=alone)

    def first(self, request: GenerateRequest, step: Step) -> None:
        """Its first step came. A prefill leg's may come before its prompt is computed: see `ended`."""
        self.prefilled.append(request.request)
        self._cached.append(step.cached_tokens)
        self._moved.set()
        if request.leg != "prefill" and (step.tokens or step.finish in ("stop", "length")):
            self.clock.first(request.request, step.cached_tokens, len(step.tokens))

    def end(self, request: GenerateRequest, step: Step) -> None:
        """Its last step came."""
        self.finished.append(request.request)
        self._moved.set()
        if request.leg == "prefill" and step.finish in ("stop", "length"):
            self.clock.first(request.request, step.cached_tokens, decodes=False)
        load = self._engine.load()
        self.clock.ended(request.request, load.running, load.waiting)

    def other(self, request: str, *, ended: bool) -> None:
        """A request of another kind began or ended: the engine has time for it and for prompts."""
        (self.finished if ended else self.accepted).append(request)
        self._moved.set()
        self.clock.doubt()

    def take(self, tokens: int) -> Progress:
        """What is to be told, once. `tokens` came in all, of all requests, so far."""
        measured = self.clock.take(tokens)
        told = Progress(
            tuple(self.accepted),
            tuple(self.prefilled),
            tuple(self.finished),
            tuple(self._cached),
            *measured,
        )
        self.accepted, self.prefilled, self.finished, self._cached = [], [], [], []
        return told
