"""How a choice ends or goes on after each failure: the error that its client reads, and what the next query asks for."""

import pytest
from msgspec.structs import replace

from headwater.actors.edge.saga.saga import step
from headwater.actors.edge.saga.types import (
    PLACE_S_MAX,
    Aborted,
    AskRouter,
    CancelAttempt,
    Cancelled,
    Detach,
    Dispatch,
    Effect,
    Finish,
    Frame,
    LegAccepted,
    LegFinished,
    LegLost,
    LegRefused,
    Opened,
    RecordEvent,
    RetryDue,
    Routed,
    RouterRefused,
    Saga,
    SagaEvent,
    TimedOut,
)
from headwater.actors.http.errors import ApiError, overloaded
from headwater.schemas.events import RequestPrefilled, RequestStepped
from headwater.schemas.inference import FrameEntry, Guide, Handoff, Sampling
from headwater.schemas.routing import Constraints, RouteRefused
from tests.unit.actors.edge.saga.test_saga import (
    DECODING,
    HANDOFF,
    MAX_TOKENS,
    OPENED,
    PREFILLED,
    PREFILLING,
    SPEC,
    decision,
    run,
)

TOKEN = Frame(FrameEntry(1, 0, (5,)), 1.0)
LOST = LegLost(1, "gone", 2.0)


def query(effects: list[Effect]) -> AskRouter:
    """The only query among these effects."""
    [asked] = [effect for effect in effects if isinstance(effect, AskRouter)]
    return asked


def failure(effects: list[Effect]) -> ApiError:
    """The error that the choice ended with."""
    last = effects[-1]
    assert isinstance(last, Finish)
    assert last.end == "error"
    assert last.error is not None
    return last.error


def setbacks(effects: list[Effect]) -> list[RequestStepped]:
    """The setbacks among these effects that the log records."""
    events = [effect.event for effect in effects if isinstance(effect, RecordEvent)]
    return [event for event in events if isinstance(event, RequestStepped)]


def test_a_prefill_that_takes_too_long_goes_elsewhere() -> None:
    """Its worker is cancelled and left out, and the log says why."""
    saga, effects = run(*PREFILLING, TimedOut(1, 700.0))
    assert effects[:2] == [CancelAttempt("w1", 1, "r-0-1"), Detach()]
    assert setbacks(effects) == [
        RequestStepped(
            "r", 0, "prefill", "timed out", "routing", "w1", 1, "worker w1: its prefill takes too long"
        )
    ]
    assert query(effects).constraints.exclude == ("w1.1",)
    assert (saga.migrations, saga.deaths) == (1, 0)


@pytest.mark.parametrize(
    ("life", "number"), [(PREFILLING, 2), (DECODING, 1), ((*PREFILLING, PREFILLED), 1), ((OPENED,), 1)]
)
def test_only_the_running_prefill_can_take_too_long(life: tuple[SagaEvent, ...], number: int) -> None:
    """A timer of an earlier attempt may end late, and nothing else than a prefill has one."""
    saga, _ = run(*life)
    assert step(saga, TimedOut(number, 700.0)) == (saga, [])


@pytest.mark.parametrize("life", [(), (OPENED,), DECODING, (*PREFILLING, PREFILLED)])
def test_an_aborted_choice_ends_with_the_error_of_its_abort(life: tuple[SagaEvent, ...]) -> None:
    """In whatever state it is, and its worker stops computing."""
    error = overloaded("the edge stops")
    before, _ = run(*life)
    saga, effects = step(before, Aborted(error))
    assert failure(effects) is error
    assert saga.end == "error"
    running = CancelAttempt("w1", 1, "r-0-1")
    assert (running in effects) == (before.streaming or before.holder is not None)


def test_a_cancelled_choice_ends_without_an_error() -> None:
    """Its client is gone."""
    saga, effects = run(*DECODING, Cancelled())
    assert effects[-1] == Finish("cancelled")
    assert saga.end == "cancelled"


def test_an_answer_that_is_complete_ends_where_its_worker_was_lost() -> None:
    """Only the word of its end is missing: the client gets `length`, and no other worker is asked."""
    tokens = Frame(FrameEntry(1, 0, tuple(range(MAX_TOKENS))), 1.0)
    saga, effects = run(*DECODING, tokens, LOST)
    assert effects[-1] == Finish("length")
    assert saga.end == "length"
    _, effects = run(*DECODING, replace(tokens, entry=FrameEntry(1, 0, tuple(range(MAX_TOKENS - 1)))), LOST)
    assert isinstance(effects[-1], AskRouter)


@pytest.mark.parametrize(
    ("sampling", "lost"),
    [
        (Sampling(MAX_TOKENS, guide=Guide("json_object")), "its grammar's state"),
        (Sampling(MAX_TOKENS, processors={"shout": {}}), "the state of its logits processors"),
        (
            Sampling(MAX_TOKENS, presence_penalty=0.5),
            "the counts of its presence and frequency penalties",
        ),
        (
            Sampling(MAX_TOKENS, frequency_penalty=0.5),
            "the counts of its presence and frequency penalties",
        ),
        (Sampling(MAX_TOKENS, thinking_budget=4), "the count of its thinking budget"),
    ],
)
def test_a_choice_whose_engine_kept_state_ends_with_what_was_lost(sampling: Sampling, lost: str) -> None:
    """Another engine would answer something that the client did not ask for. Before the first token nothing is lost."""
    begun = Saga(replace(SPEC, sampling=sampling))
    _, effects = run(*DECODING, TOKEN, LOST, saga=begun)
    error = failure(effects)
    assert error.status == 502
    assert (
        str(error) == f"gone; {lost} after 1 tokens was lost with the worker, so it cannot continue; retry."
    )
    saga, effects = run(*DECODING, LOST, saga=begun)
    assert isinstance(effects[-1], AskRouter)
    assert saga.end is None


@pytest.mark.parametrize(("param", "named"), [("top_k", "top_k"), ("", "response_format")])
def test_what_an_engine_rejects_is_the_clients_error(param: str, named: str) -> None:
    """As its end or as its reply; without a field it is the one that asked for guided decoding."""
    begun = Saga(replace(SPEC, guide_param="response_format"))
    ended = (*DECODING, LegFinished(0, "rejected", "no such grammar", param, 1.0))
    refused = (
        OPENED,
        Routed(1, decision(), 0.0, 0.0),
        LegRefused(1, "no such grammar", False, False, param, 1.0),
    )
    for life in (ended, refused):
        saga, effects = run(*life, saga=begun)
        error = failure(effects)
        assert (error.status, error.param) == (400, named)
        assert "no such grammar" in str(error)
        assert saga.migrations == 0


@pytest.mark.parametrize(
    ("detail", "reason"), [("", "it aborted the request"), ("out of blocks", "out of blocks")]
)
def test_a_choice_that_its_engine_aborts_moves(detail: str, reason: str) -> None:
    """The log has the engine's reason, or says that there is none. The worker may be asked again: it is well."""
    _, effects = run(*DECODING, LegFinished(0, "abort", detail, "", 1.0))
    [setback] = setbacks(effects)
    assert (setback.cause, setback.reason) == ("lost", f"worker w1: {reason}")
    assert query(effects).constraints.exclude == ()


def test_a_worker_that_is_merely_lost_keeps_its_request_from_other_workers_only_for_a_while() -> None:
    """A lost connection is no death: three of them end no request."""
    saga, _ = run(*DECODING, replace(LOST, died=False))
    assert saga.died_with == ()
    saga, _ = run(*DECODING, replace(LOST, died=True))
    assert saga.died_with == ("w1.1",)


# Prefilled prompts.


def test_what_a_prefill_leg_left_decides_who_decodes() -> None:
    """The same pairing and revision as the decision for the prefill; the worker that a client pinned may be another."""
    spec = replace(SPEC, constraints=Constraints(revision="any"))
    chosen = replace(decision("prefill"), pairs_with="pair-7", revision="blue")
    life = (Opened("w9", 0.0), Routed(1, chosen, 0.0, 0.5), LegAccepted(1, 0.5), PREFILLED)
    saga, effects = run(*life, saga=Saga(spec))
    assert query(effects).constraints == Constraints(leg="decode", pairs_with="pair-7", revision="blue")
    assert saga.holder is not None
    assert (saga.holder.pairs_with, saga.holder.revision) == ("pair-7", "blue")
    [recorded] = [effect.event for effect in effects if isinstance(effect, RecordEvent)]
    assert recorded == RequestPrefilled("r", 0, "w1", 1, "h", 500.0, 10_000)
    _, effects = run(Opened("w9", 0.0), saga=Saga(spec))
    assert query(effects).constraints == Constraints(pinned="w9", revision="any")


def test_a_prefill_leg_that_left_nothing_is_recorded_so() -> None:
    """The decode worker computes the prompt: there is nothing to claim."""
    saga, effects = run(*PREFILLING, Frame(FrameEntry(1, 0, (), "handoff"), 1.23456))
    [recorded] = [effect.event for effect in effects if isinstance(effect, RecordEvent)]
    assert recorded == RequestPrefilled("r", 0, "w1", 1, "", 1234.56, 0)
    saga, effects = step(saga, Routed(2, decision("decode", "w2"), 0.0, 2.0))
    assert effects == [Dispatch(saga.attempt, None)]
    assert (saga.attempt.leg, saga.attempt.began_s, saga.attempt.first) == ("", 2.0, 0)


def test_tokens_of_a_prefill_leg_are_a_failure_of_its_worker() -> None:
    """They would be lost with the leg."""
    _, effects = run(*PREFILLING, TOKEN)
    [setback] = setbacks(effects)
    assert setback.reason == "worker w1: it sent tokens for a prefill leg"


@pytest.mark.parametrize(("late_s", "kept"), [(-0.001, True), (0.0, False)])
def test_a_hand_off_that_nobody_claimed_in_time_is_given_up(late_s: float, kept: bool) -> None:
    """From the millisecond on at which its worker frees the KV; the log has its name."""
    expires_s = 1.0 + HANDOFF.expires_ms / 1000
    life = (*PREFILLING, PREFILLED, Routed(2, decision("decode", "w2"), 0.0, 1.0))
    saga, effects = run(*life, LegRefused(2, "full", True, False, "", expires_s + late_s))
    assert (saga.state == "handoff") == kept
    given_up = [setback for setback in setbacks(effects) if setback.cause == "timed out"]
    assert [(setback.reason, setback.handoff) for setback in given_up] == (
        [] if kept else [("no worker claimed the prefilled prompt in time: full", "h")]
    )
    assert query(effects).constraints.leg == ("decode" if kept else "")


def test_a_prompt_that_is_prefilled_too_often_ends_its_request() -> None:
    """A hand-off that nobody could use counts as a migration."""
    saga, _ = run(*PREFILLING, PREFILLED, saga=Saga(replace(SPEC, migrations_max=1)))
    spent = LegRefused(2, "consumed", True, True, "", 1.0)
    saga, _ = run(Routed(2, decision("decode", "w2"), 0.0, 1.0), spent, saga=saga)
    again = Frame(FrameEntry(3, 0, (), "handoff", handoff=Handoff("h3", "w3", 1, b"", 4, 10_000)), 2.0)
    saga, _ = run(
        Routed(saga.attempts, decision("prefill", "w3"), 0.0, 1.0),
        LegAccepted(saga.attempts, 1.0),
        again,
        saga=saga,
    )
    number = saga.attempts
    saga, effects = run(
        Routed(number, decision("decode", "w4"), 0.0, 2.0), replace(spent, number=number), saga=saga
    )
    assert str(failure(effects)) == "The request was migrated 1 times; last reason: consumed."
    assert saga.end == "error"


# Searches.


def test_a_search_for_a_choice_that_comes_with_a_decision_ends_as_others_do() -> None:
    """Its time begins when it opens, whoever decided first."""
    saga, _ = run(Opened("", 100.0, 1, decision()), saga=Saga(SPEC))
    assert saga.attempt.began_s == 100.0
    saga, effects = run(LegRefused(1, "full", True, False, "", 100.0 + PLACE_S_MAX), saga=saga)
    assert failure(effects).status == 503


def test_a_lost_worker_whose_acceptance_comes_late_is_the_reason_of_the_search() -> None:
    """The client reads why nothing was found."""
    saga, _ = run(OPENED, Routed(1, decision(), 0.0, 0.0), replace(LOST, now_s=0.5))
    _, effects = run(LegAccepted(1, PLACE_S_MAX), saga=saga)
    assert "worker w1 was lost" in str(failure(effects))


def test_a_reply_that_comes_after_a_retry_counts_for_its_own_attempt_only() -> None:
    """A query, a pause and a dispatch are answered by their numbers."""
    saga, _ = run(OPENED, RouterRefused(1, RouteRefused("full"), 0.0, 0.0), RetryDue(1, 0.1))
    for late in (Routed(1, decision(), 0.0, 0.2), RetryDue(1, 0.2), LegAccepted(2, 0.2)):
        assert step(saga, late) == (saga, [])
