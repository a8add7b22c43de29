"""Whole lives of a saga in which any message may be lost, late or repeated: each token once, in order, one end."""

from collections import deque
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headwater.actors.edge.saga.saga import step
from headwater.actors.edge.saga.types import (
    AskRouter,
    Dispatch,
    Emit,
    Finish,
    Frame,
    LegAccepted,
    LegFinished,
    LegLost,
    LegRefused,
    LegUnanswered,
    Opened,
    PauseSearch,
    RetryDue,
    Routed,
    RouterRefused,
    RouterUnanswered,
    Saga,
    SagaEvent,
    TimedOut,
)
from headwater.schemas.inference import FrameEntry, Leg
from headwater.schemas.routing import RouteRefused
from tests.unit.actors.edge.saga.test_saga import (
    HANDOFF,
    MAX_TOKENS,
    PREFILLED,
    SPEC,
    any_event,
    check_step,
    decision,
)


class World:
    """Routers and workers that may refuse, lose, repeat and delay anything; the client sees only `Emit` and `Finish`.

    Each worker generates the tokens 0, 1, 2, …, from where it was told that the answer is.
    """

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.saga = Saga(SPEC)
        self.now_s = 0.0
        self.tokens: list[int] = []
        self.ends: list[Finish] = []
        self.due: deque[AskRouter | Dispatch | PauseSearch] = deque()
        self.legs: dict[int, tuple[Leg, int]] = {}
        self.feed(Opened("", 0.0))

    def feed(self, event: SagaEvent) -> None:
        """One step, checked, and its effects."""
        before = self.saga
        self.saga, effects = step(before, event)
        check_step(before, event, self.saga, effects)
        for effect in effects:
            if isinstance(effect, AskRouter | Dispatch | PauseSearch):
                self.due.append(effect)
            elif isinstance(effect, Finish):
                self.ends.append(effect)
            elif isinstance(effect, Emit):
                self.tokens += effect.tokens

    def act(self) -> None:
        """One thing that may happen now."""
        self.now_s += self.draw(st.sampled_from([0.0, 0.1, 3.0]))
        acts = ["reply"] * 3 * bool(self.due) + ["frame"] * 4 + ["lost", "timeout", "stale frame"]
        act = self.draw(st.sampled_from(acts))
        number = self.saga.attempt.number
        if act == "reply":
            self._reply(self.due.popleft())
        elif act == "frame" and self.saga.streaming:
            self._frame(number)
        elif act == "stale frame":
            # The registry drops frames of former handles; frames between two legs reach the saga.
            if not self.saga.streaming:
                self.feed(Frame(FrameEntry(1, 0, (99,)), self.now_s))
        elif act == "lost":
            self.feed(LegLost(self.draw(st.sampled_from([number, number - 1])), "gone", self.now_s))
        elif act == "timeout":
            self.feed(TimedOut(number, self.now_s))

    def _reply(self, effect: AskRouter | Dispatch | PauseSearch) -> None:
        draw, now_s = self.draw, self.now_s
        if isinstance(effect, PauseSearch):
            self.feed(RetryDue(effect.number, now_s))
        elif isinstance(effect, AskRouter):
            how = draw(st.sampled_from(["routed"] * 5 + ["refused", "silent"]))
            if how == "routed":
                legs: list[Leg] = ["", "decode"] if effect.constraints.leg == "decode" else ["", "prefill"]
                named = decision(draw(st.sampled_from(legs)), draw(st.sampled_from(["w1", "w2", "w3"])))
                self.feed(Routed(effect.number, named, draw(st.sampled_from([0.0, 4.0])), now_s))
            elif how == "refused":
                self.feed(RouterRefused(effect.number, RouteRefused("full"), 0.0, now_s))
            else:
                self.feed(RouterUnanswered(effect.number, "timeout", 0.0, now_s))
        else:
            number = effect.attempt.number
            how = draw(st.sampled_from(["accepted"] * 5 + ["refused", "spent", "silent", "nobody"]))
            if how == "accepted":
                self.feed(LegAccepted(number, now_s))
            elif how in ("refused", "spent"):
                self.feed(LegRefused(number, "full", True, how == "spent", "", now_s))
            else:
                self.feed(LegUnanswered(number, "timeout", how == "silent", now_s))

    def _frame(self, number: int) -> None:
        """What the worker of the running attempt sends: from any position up to one beyond what arrived."""
        saga, draw = self.saga, self.draw
        if saga.attempt.leg == "prefill":
            handoff = draw(st.sampled_from([HANDOFF, None]))
            self.feed(Frame(FrameEntry(number, 0, (), "handoff", handoff=handoff), self.now_s))
            return
        first = saga.attempt.first
        position = draw(st.integers(0, saga.received + 1))
        size = draw(st.integers(0, 3))
        tokens = tuple(range(first + position, min(first + position + size, MAX_TOKENS)))
        last = position + len(tokens)
        self.feed(Frame(FrameEntry(number, position, tokens), self.now_s))
        if first + last == MAX_TOKENS:
            self.feed(LegFinished(last, "length", "", "", self.now_s))
        elif draw(st.integers(0, 9)) == 0:
            self.feed(LegFinished(last, "abort", "killed", "", self.now_s))


@given(st.data())
def test_every_token_is_emitted_once_and_there_is_one_end(data: st.DataObject) -> None:
    """Through refusals, losses, moves and hand-offs: the tokens in order without a hole, then exactly one end."""
    world = World(data.draw)
    for _ in range(data.draw(st.integers(0, 60))):
        world.act()
        assert world.tokens == list(range(len(world.tokens)))
    if world.saga.end is None:
        # An outcome is always near: an answer to what is awaited, then all the tokens.
        for _ in range(40):
            if world.saga.streaming and world.saga.attempt.leg == "prefill":
                world.feed(PREFILLED)
            elif world.saga.streaming:
                rest = tuple(range(world.saga.emitted, MAX_TOKENS))
                entry = FrameEntry(1, world.saga.received, rest)
                world.feed(Frame(entry, world.now_s))
                if world.saga.streaming:
                    world.feed(LegFinished(world.saga.received, "length", "", "", world.now_s))
            if world.saga.end is not None:
                break
            assert world.due, "a choice that neither streams nor awaits anything is stuck"
            effect = world.due.popleft()
            if isinstance(effect, AskRouter):
                leg: Leg = "decode" if effect.constraints.leg else ""
                world.feed(Routed(effect.number, decision(leg), 0.0, world.now_s))
            elif isinstance(effect, Dispatch):
                world.feed(LegAccepted(effect.attempt.number, world.now_s))
            else:
                world.feed(RetryDue(effect.number, world.now_s))
    [finish] = world.ends
    assert world.tokens == list(range(len(world.tokens)))
    assert finish.end in ("length", "error")
    assert finish.end == "error" or len(world.tokens) == MAX_TOKENS
    for event in any_event(world.saga.attempts):
        world.feed(event)
    assert len(world.ends) == 1
