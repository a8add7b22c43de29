"""A request that workers die of ends after a few of them; what counts as a death."""

import pytest
from msgspec.structs import replace

from headwater.actors.edge.saga.saga import DEATHS_MAX, step
from headwater.actors.edge.saga.types import (
    MOVE_S_MAX,
    AskRouter,
    CancelAttempt,
    ChoiceSpec,
    Effect,
    Finish,
    Frame,
    HolderLost,
    LegAccepted,
    LegFinished,
    LegLost,
    LegRefused,
    LegUnanswered,
    RetryDue,
    Routed,
    RouterRefused,
    Saga,
    SagaEvent,
)
from headwater.actors.http.errors import NO_RETRY
from headwater.schemas.inference import FrameEntry, Sampling
from headwater.schemas.routing import RouteRefused
from headwater.schemas.tables import MIGRATIONS_MAX
from tests.unit.actors.edge.saga.test_saga import (
    CLAIMING,
    DECODING,
    OPENED,
    PREFILLING,
    WAITING,
    decision,
    excluded,
    run,
)


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


def none_left(saga: Saga, now_s: float = 1.0) -> tuple[Saga, list[Effect]]:
    """The router has no other worker; after the pause it is queried again."""
    number = saga.attempts
    return run(
        RouterRefused(number, RouteRefused("nobody"), 0.0, now_s), RetryDue(number, now_s + 0.1), saga=saga
    )


@pytest.mark.parametrize("finish", ["died", "fatal"])
@pytest.mark.parametrize("life", [DECODING, PREFILLING, (*CLAIMING, LegAccepted(2, 1.0))])
def test_the_search_after_a_death_never_returns_to_the_dead_incarnation(
    life: tuple[SagaEvent, ...], finish: str
) -> None:
    """Whatever part of the request it had, and also once there is no other worker: its next incarnation is waited for."""
    saga, _ = run(*life)
    dead = f"{saga.attempt.worker}.{saga.attempt.epoch}"
    saga, effects = run(LegFinished(0, finish, "its engine died", "", 1.0), saga=saga)
    assert excluded(effects) == (dead,)
    for _ in range(3):
        saga, effects = none_left(saga)
        assert excluded(effects) == (dead,)
    number = saga.attempts
    other = replace(decision(), worker="w3")
    saga, effects = run(
        Routed(number, other, 0.0, 1.0), LegRefused(number, "full", True, False, "", 1.0), saga=saga
    )
    assert sorted(excluded(effects)) == sorted((dead, "w3.1"))
    saga, effects = none_left(saga)
    assert excluded(effects) == (dead,), "who only refused is asked again"


@pytest.mark.parametrize(
    "lost",
    [
        LegLost(1, "its lease ended", 1.0),
        LegFinished(0, "error", "it failed", "", 1.0),
    ],
)
def test_a_worker_that_may_live_is_tried_again_after_all_others(lost: SagaEvent) -> None:
    """One that lost its lease keeps its epoch if its connection comes back, and one that failed a request takes others."""
    saga, effects = run(*DECODING, lost)
    assert excluded(effects) == ("w1.1",)
    saga, effects = none_left(saga)
    assert excluded(effects) == ()


def test_refusals_are_no_migrations() -> None:
    """However many there are: the search ends by its time limit."""
    saga, _ = run(*DECODING, LegFinished(0, "died", "its engine died", "", 0.0))
    moved, now_s = saga.migrations, 0.0
    while now_s < MOVE_S_MAX - 1.0:
        now_s += 0.1
        number = saga.attempts
        refused = LegRefused(number, "its engine died", True, False, "", now_s)
        saga, _ = run(Routed(number, decision(), 0.0, now_s), refused, saga=saga)
        assert (saga.migrations, saga.end) == (moved, None)
    number = saga.attempts
    saga, _ = run(
        Routed(number, replace(decision(), epoch=2), 0.0, now_s), LegAccepted(number, now_s), saga=saga
    )
    assert saga.state == "decode"


def test_a_prefilled_prompt_is_computed_again_at_once_where_nobody_can_decode() -> None:
    """The router knows of no decode worker: the prefill worker would only keep KV that nobody fetches until its lease ends."""
    saga, effects = run(*CLAIMING, LegUnanswered(2, "no process", False, 1.0))
    assert (saga.state, excluded(effects)) == ("handoff", ("w2.1",))
    saga, effects = none_left(saga)
    assert (saga.state, excluded(effects)) == ("handoff", ()), "it may only have failed to answer"
    saga, effects = run(RouterRefused(saga.attempts, RouteRefused("no decode worker"), 0.0, 1.2), saga=saga)
    assert saga.state == "routing"
    [ask] = [effect for effect in effects if isinstance(effect, AskRouter)]
    assert ask.constraints.leg == ""
    assert CancelAttempt("w1", 1, "r-0-1") in effects, "its KV is released"
