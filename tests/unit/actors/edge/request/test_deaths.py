"""A request that workers die of ends after a few of them; what counts as a death."""

import pytest
from msgspec.structs import replace

from headwater.actors.edge.request.migration import DEATHS_MAX
from headwater.actors.edge.request.saga import MIGRATIONS_MAX, step
from headwater.actors.edge.request.saga_types import (
    ChoiceSpec,
    Finish,
    Frame,
    HolderLost,
    LegAccepted,
    LegFinished,
    LegLost,
    LegUnanswered,
    Routed,
    Saga,
)
from headwater.actors.http.errors import NO_RETRY
from headwater.schemas.messages.inference import FrameEntry, Sampling
from tests.unit.actors.edge.request.test_saga import DECODING, OPENED, WAITING, decision, run


def ends(finish: str, *, emits: int = 0) -> Finish:
    """The end of a request of which each incarnation of a worker ends in this way, after so many tokens of its own."""
    saga, effects = run(OPENED, saga=Saga(ChoiceSpec("r", 0, Sampling(1_000))))
    while saga.end is None:
        number = saga.attempts
        made = replace(decision(), epoch=number)
        saga, _ = run(Routed(number, made, 0.0, 0.0), LegAccepted(number, 0.0), saga=saga)
        if emits:
            saga, _ = step(saga, Frame(FrameEntry(1, 0, (5,) * emits), 0.0))
        lost = (
            LegLost(number, "gone", 0.0) if finish == "lost" else LegFinished(emits, finish, "gone", "", 0.0)
        )
        saga, effects = step(saga, lost)
        assert saga.attempts <= MIGRATIONS_MAX + 1
    [finished] = [effect for effect in effects if isinstance(effect, Finish)]
    assert finished.error is not None
    assert finished.error.status == 502
    return finished


@pytest.mark.parametrize(
    ("finish", "emits", "is_cause"),
    [
        ("fatal", 0, True),
        ("fatal", 3, True),
        ("died", 0, True),
        ("lost", 0, True),
        # It streamed: another request was most likely the cause.
        ("died", 3, False),
        ("lost", 3, False),
        # The worker lives on.
        ("error", 0, False),
        ("abort", 0, False),
    ],
)
def test_a_request_that_workers_die_of_is_not_tried_again(finish: str, emits: int, is_cause: bool) -> None:
    """Clients are told not to retry it either."""
    error = ends(finish, emits=emits).error
    assert error is not None
    assert (error.code == "request_ended_workers") == is_cause
    assert (error.headers == NO_RETRY) == is_cause
    assert str(error).startswith(f"{DEATHS_MAX} workers failed") == is_cause


def test_an_incarnation_counts_once_however_often_the_request_was_sent_to_it() -> None:
    """The router may name one again that is ending: its end is no second one."""
    saga, _ = run(*DECODING, LegFinished(0, "fatal", "it broke", "", 0.0))
    saga, _ = run(Routed(2, decision(), 0.0, 0.0), LegLost(2, "its lease ended", 0.0), saga=saga)
    assert (saga.deaths, saga.end) == (1, None)
    saga, _ = run(LegUnanswered(2, "its lease ended", False, 0.0), saga=saga)
    later = replace(decision(), epoch=2)
    saga, _ = run(Routed(saga.attempts, later, 0.0, 0.0), LegAccepted(saga.attempts, 0.0), saga=saga)
    saga, _ = run(LegFinished(0, "fatal", "it broke", "", 0.0), saga=saga)
    assert (saga.deaths, saga.died_with) == (2, ("w1.1", "w1.2"))


def test_a_prefill_leg_that_its_worker_dies_of_counts_while_another_worker_waits_for_it() -> None:
    """In a room both legs run: the end of either is counted once."""
    for finish, deaths in (("fatal", 1), ("died", 1), ("error", 0)):
        saga, _ = run(*WAITING, HolderLost("r-0-1", "gone", 2.0, finish))
        assert saga.deaths == deaths
