"""The pure saga: every state with every event, and what each failure leads to."""

from typing import get_args

import pytest
from msgspec.structs import replace

from headwater.actors.edge.saga.saga import is_migratable, step
from headwater.actors.edge.saga.types import (
    MOVE_S_MAX,
    PLACE_S_MAX,
    SETBACKS,
    TRANSITIONS,
    Aborted,
    AskRouter,
    AskStatus,
    CancelAttempt,
    Cancelled,
    Cause,
    ChoiceSpec,
    Detach,
    Dispatch,
    Effect,
    Emit,
    Finish,
    Frame,
    HolderLost,
    IllegalTransition,
    LegAccepted,
    LegFinished,
    LegLost,
    LegRefused,
    LegUnanswered,
    Opened,
    PauseSearch,
    RecordEvent,
    RetryDue,
    Routed,
    RouterRefused,
    RouterUnanswered,
    Saga,
    SagaEvent,
    StopMatched,
    TimedOut,
    after,
)
from headwater.actors.http.errors import overloaded
from headwater.schemas.events import RequestPrefilled, RequestRouted, RequestStepped, SagaState
from headwater.schemas.inference import FrameEntry, Guide, Handoff, Leg, Sampling
from headwater.schemas.routing import (
    NO_CONSTRAINTS,
    NO_PREFERENCES,
    Constraints,
    Decision,
    RouteRefused,
    Weights,
)
from headwater.schemas.tables import MIGRATIONS_MAX, required_capabilities

MAX_TOKENS = 6
SPEC = ChoiceSpec("r", 0, Sampling(MAX_TOKENS))
HANDOFF = Handoff("h", "w1", 1, b"", 4, 10_000)
ROOM = Handoff("h", "w1", 1, b"", 4, 10_000, "room")
STATES: tuple[SagaState, ...] = get_args(SagaState)
Run = tuple[Saga, list[Effect]]


def decision(leg: Leg = "", worker: str = "w1", epoch: int = 1) -> Decision:
    """The router names a worker."""
    made = (1, 0, 0, 0, "r-0-1", 4, 6, 0, 0, 0, 0, NO_CONSTRAINTS, NO_PREFERENCES, Weights(), 0)
    return Decision(*made, worker, epoch, (), leg=leg)


def run(*events: SagaEvent, saga: Saga | None = None) -> Run:
    """A saga after these events, and the effects of the last one."""
    saga = saga or Saga(SPEC)
    effects: list[Effect] = []
    for event in events:
        saga, effects = step(saga, event)
    return saga, effects


OPENED = Opened("", 0.0)
ROUTED = Routed(1, decision(), 0.0, 0.0)
DECODING = (OPENED, ROUTED, LegAccepted(1, 0.0))
PREFILLING = (OPENED, Routed(1, decision("prefill"), 0.0, 0.0), LegAccepted(1, 0.0))
PREFILLED = Frame(FrameEntry(1, 0, (), "handoff", handoff=HANDOFF), 1.0)
HANDED = (*PREFILLING, PREFILLED)
CLAIMING = (*HANDED, Routed(2, decision("decode", "w2"), 0.0, 1.0))
ROOM_OPENED = Frame(FrameEntry(1, 0, (), handoff=ROOM), 1.0)
WAITING = (*PREFILLING, ROOM_OPENED, Routed(2, decision("decode", "w2"), 0.0, 1.0), LegAccepted(2, 1.0))

LIVES: dict[str, tuple[SagaEvent, ...]] = {
    "new": (),
    "routing": (OPENED,),
    "routing, paused": (OPENED, RouterRefused(1, RouteRefused("full"), 0.0, 0.0)),
    "routing, dispatched": (OPENED, ROUTED),
    "routing, lost": (OPENED, ROUTED, LegLost(1, "gone", 0.0)),
    "routing, moved": (*DECODING, LegLost(1, "gone", 0.0)),
    "prefill": PREFILLING,
    "handoff": HANDED,
    "handoff, dispatched": CLAIMING,
    "handoff, refused": (*CLAIMING, LegRefused(2, "full", True, False, "", 1.0)),
    "routing, hand-off lost": (*CLAIMING, LegLost(2, "gone", 1.0)),
    "decode": DECODING,
    "decode, by a frame": (OPENED, ROUTED, Frame(FrameEntry(1, 0, (7,)), 0.0)),
    "decode, after a hand-off": (*CLAIMING, LegAccepted(2, 1.0)),
    "decode, in a room": WAITING,
    "handoff, to a room": (*PREFILLING, ROOM_OPENED),
    "ended": (*DECODING, Cancelled()),
    "ended, dispatched": (OPENED, ROUTED, Cancelled()),
}


def test_a_request_that_comes_with_a_decision_goes_there_unasked() -> None:
    """Under the name that it was decided for. If that fails, or is of another prompt, a router is asked for the next attempt."""
    saga, effects = run(Opened("", 0.0, 2, decision(worker="w9")))
    assert [type(effect) for effect in effects] == [Dispatch]
    assert (saga.attempt.worker, saga.attempt.name, saga.state) == ("w9", "r-0-2", "routing")
    saga, effects = run(LegRefused(2, "full", True, False, "", 0.0), saga=saga)
    [asked] = [effect for effect in effects if isinstance(effect, AskRouter)]
    assert (asked.attempt, asked.constraints.exclude) == ("r-0-3", ("w9.1",))
    _, [unfit] = run(Opened("", 0.0, 2))
    assert isinstance(unfit, AskRouter)
    assert unfit.attempt == "r-0-3"


def any_event(number: int) -> list[SagaEvent]:
    """One event of each kind and variant, about attempt `number`."""
    return [
        Opened("w1", 2.0),
        *(Routed(number, decision(leg), 0.5, 2.0) for leg in get_args(Leg)),
        RouterRefused(number, RouteRefused("full"), 0.0, 2.0),
        RouterRefused(number, RouteRefused("too long a queue", status=429), 0.0, 2.0),
        RouterRefused(number, RouteRefused("full"), 0.0, 1_000.0),
        RouterUnanswered(number, "timeout", 0.0, 2.0),
        RetryDue(number, 2.0),
        RetryDue(number, 1_000.0),
        LegAccepted(number, 2.0),
        *(
            LegRefused(number, "full", retryable, spent, "", 2.0)
            for retryable in (False, True)
            for spent in (False, True)
        ),
        LegUnanswered(number, "timeout", True, 2.0),
        LegUnanswered(number, "nobody", False, 2.0),
        Frame(FrameEntry(1, 0, (1, 2)), 2.0),
        Frame(FrameEntry(1, 5, (1, 2)), 2.0),
        PREFILLED,
        Frame(FrameEntry(1, 0, (), "handoff"), 2.0),
        *(LegFinished(0, how, "", "", 2.0) for how in ("stop", "length", "abort", "error", "rejected")),
        LegFinished(9, "stop", "", "", 2.0),
        LegLost(number, "gone", 2.0),
        HolderLost(f"r-0-{number}", "gone", 2.0),
        TimedOut(number, 2.0),
        StopMatched(),
        Cancelled(),
        Aborted(overloaded("the edge stops")),
    ]


@pytest.mark.parametrize("life", LIVES)
def test_every_event_in_every_state_is_defined(life: str) -> None:
    """No event raises; what one asks for is consistent with the state that it leads to."""
    saga, _ = run(*LIVES[life])
    assert saga.state == ("routing" if life == "new" else life.partition(",")[0])
    for number in {saga.attempts, max(0, saga.attempts - 1), saga.attempts + 1}:
        for event in any_event(number):
            check_step(saga, event, *step(saga, event))


def check_step(before: Saga, event: SagaEvent, saga: Saga, effects: list[Effect]) -> None:
    kinds = [type(effect) for effect in effects]
    assert (saga.end is not None) == (saga.state == "ended"), event
    assert kinds.count(Finish) == (before.end is None and saga.end is not None), event
    assert not (Finish in kinds and kinds[-1] is not Finish), "nothing is done after the end"
    assert Emit not in kinds[:-1], "the client may end the choice as it gets its tokens"
    awaited = [effect for effect in effects if isinstance(effect, AskRouter | Dispatch | PauseSearch)]
    assert len(awaited) <= 1, event
    if awaited:
        assert (
            saga.awaits == {AskRouter: "route", Dispatch: "dispatch", PauseSearch: "pause"}[type(awaited[0])]
        )
    assert saga.emitted - before.emitted == sum(len(e.tokens) for e in effects if isinstance(e, Emit))
    assert saga.streaming == ((before.streaming and Detach not in kinds) or Dispatch in kinds), event
    assert (saga.holder is not None) <= (saga.state in ("handoff", "decode")), event
    assert saga.state != "handoff" or saga.holder is not None
    if before.end is not None:
        assert saga == before
        assert set(kinds) <= {CancelAttempt}


def test_every_state_is_reached() -> None:
    """The lives above cover the table."""
    assert {run(*life)[0].state for life in LIVES.values()} == set(STATES)


def test_a_request_without_failures() -> None:
    """Routed, dispatched, accepted, streamed, finished."""
    saga, effects = run(OPENED)
    assert effects == [AskRouter(1, "r-0-1", NO_CONSTRAINTS)]
    saga, [dispatch] = run(ROUTED, saga=saga)
    assert isinstance(dispatch, Dispatch)
    assert (dispatch.attempt.name, dispatch.attempt.worker, dispatch.attempt.leg) == ("r-0-1", "w1", "")
    saga, effects = run(LegAccepted(1, 0.0), saga=saga)
    assert effects == [RecordEvent(RequestRouted("r", 0, "r-0-1", "w1", 1, 0))]
    saga, effects = run(Frame(FrameEntry(1, 0, (5, 6), cached_tokens=3), 0.0), saga=saga)
    assert (effects, saga.emitted, saga.cached_tokens) == ([Emit((5, 6), ())], 2, 3)
    saga, effects = run(LegFinished(2, "stop", "", "", 0.0), saga=saga)
    assert effects == [Detach(), Finish("stop")]


def test_a_repeated_frame_is_cut_and_a_lost_one_is_queried() -> None:
    """By position: only what is new is emitted, and nothing behind a gap, its end included."""
    saga, _ = run(*DECODING, Frame(FrameEntry(1, 0, (5, 6)), 0.0))
    again, effects = step(saga, Frame(FrameEntry(1, 1, (6, 7, 8)), 0.0))
    assert (effects, again.emitted) == ([Emit((7, 8), ())], 4)
    assert run(Frame(FrameEntry(1, 0, (5,)), 0.0), saga=saga) == (saga, [])
    assert run(Frame(FrameEntry(1, 3, (8,)), 0.0), saga=saga) == (saga, [AskStatus()])
    assert run(LegFinished(4, "stop", "", "", 0.0), saga=saga) == (saga, [])


def test_a_matched_stop_string_ends_the_request_and_the_work_of_its_engine() -> None:
    """The engine does not know stop strings; without the cancellation it generates up to the length."""
    saga, effects = run(*DECODING, Frame(FrameEntry(1, 0, (5, 6)), 0.0), StopMatched())
    assert saga.state == "ended"
    assert effects == [CancelAttempt("w1", saga.attempt.epoch, "r-0-1"), Detach(), Finish("stop")]
    assert run(*HANDED, StopMatched())[1] == [], "no text is generated yet"


def test_what_was_cached_is_what_the_prefill_leg_says() -> None:
    """The decode leg's engine counts the transferred prompt as cached; it was computed, or cached, before."""
    prefilled = Frame(FrameEntry(1, 0, (), "handoff", cached_tokens=2, handoff=HANDOFF), 1.0)
    decoding = Routed(2, decision("decode", "w2"), 0.0, 1.0), LegAccepted(2, 1.0)
    first = Frame(FrameEntry(2, 0, (5,), cached_tokens=4), 1.0)
    saga, _ = run(*PREFILLING, prefilled, *decoding, first)
    assert (saga.emitted, saga.cached_tokens) == (1, 2)
    saga, _ = run(*HANDED, *decoding, first)
    assert saga.cached_tokens == -1, "a transfer is no hit, also where the prefill leg said nothing"


def test_a_prefilled_prompt_is_claimed_once_and_released_at_the_first_token() -> None:
    """The worker with the KV is cancelled when the decode worker has it, not before."""
    saga, effects = run(*HANDED)
    assert [e.event for e in effects if isinstance(e, RecordEvent)] == [
        RequestPrefilled("r", 0, "w1", 1, "h", 1000.0, 10_000)
    ]
    assert effects[-1] == AskRouter(2, "r-0-2", Constraints(leg="decode"), may_wait=False)
    saga, [dispatch] = step(saga, Routed(2, decision("decode", "w2"), 0.0, 1.0))
    assert isinstance(dispatch, Dispatch)
    assert (dispatch.handoff, dispatch.attempt.leg) == (HANDOFF, "decode")
    saga, effects = run(LegAccepted(2, 1.0), saga=saga)
    assert effects == [RecordEvent(RequestRouted("r", 0, "r-0-2", "w2", 1, 0, "decode", "h"))]
    saga, effects = run(Frame(FrameEntry(2, 0, (5,)), 1.0), saga=saga)
    assert effects == [CancelAttempt("w1", 1, "r-0-1", fetched=True), Emit((5,), ())]
    assert saga.holder is None


def test_a_room_is_opened_before_the_prompt_is_computed() -> None:
    """Both legs run; the end of the prefill leg is still followed, and it is not stopped when its KV has arrived."""
    saga, effects = run(*PREFILLING, ROOM_OPENED)
    assert (saga.state, effects[0]) == ("handoff", Detach(follows=True))
    saga, effects = run(*WAITING)
    assert saga.awaited is not None
    saga, effects = run(Frame(FrameEntry(2, 0, (5,), cached_tokens=3), 1.0), saga=saga)
    assert effects == [CancelAttempt("w1", 1, "r-0-1", fetched=True), Emit((5,), ())]
    assert (saga.cached_tokens, saga.awaited) == (3, None), "what the prefill leg found, by the decode leg"


def test_a_client_that_leaves_a_room_stops_both_legs() -> None:
    """Neither engine would notice: each would wait for the other."""
    _, effects = run(*WAITING, Cancelled())
    assert [effect for effect in effects if isinstance(effect, CancelAttempt)] == [
        CancelAttempt("w2", 1, "r-0-2"),
        CancelAttempt("w1", 1, "r-0-1"),
    ]


@pytest.mark.parametrize(
    ("event", "lost"),
    [
        (HolderLost("r-0-1", "gone", 2.0), "w1.1"),
        (HolderLost("r-0-1", "gone", 2.0, "died"), "w1.1"),
        (LegLost(2, "gone", 2.0), "w2.1"),
    ],
)
def test_the_death_of_either_side_of_a_room_ends_the_other_leg(event: SagaEvent, lost: str) -> None:
    """And the prompt is computed again, in another room, which the lost worker is not asked to enter first."""
    saga, effects = run(*WAITING, event)
    assert {effect.attempt for effect in effects if isinstance(effect, CancelAttempt)} == {"r-0-1", "r-0-2"}
    assert not any(effect.fetched for effect in effects if isinstance(effect, CancelAttempt))
    assert (saga.state, saga.holder, effects[-1]) == (
        "routing",
        None,
        AskRouter(3, "r-0-3", replace(NO_CONSTRAINTS, exclude=(lost,)), may_wait=False),
    )


def test_a_prefill_leg_that_is_not_awaited_may_die() -> None:
    """Its KV has arrived, or it is another room's."""
    arrived = (*WAITING, Frame(FrameEntry(2, 0, (5,)), 1.0))
    for life in (arrived, (*CLAIMING, LegAccepted(2, 1.0))):
        saga, _ = run(*life)
        assert step(saga, HolderLost("r-0-1", "gone", 2.0)) == (saga, [])
    saga, _ = run(*WAITING)
    assert step(saga, HolderLost("r-0-9", "gone", 2.0)) == (saga, [])


@pytest.mark.parametrize(
    ("event", "cause"),
    [
        (LegRefused(2, "consumed", True, True, "", 2.0), "spent"),
        (LegUnanswered(2, "timeout", True, 2.0), "spent"),
        (LegLost(2, "gone", 2.0), "spent"),
        (LegRefused(2, "full", True, False, "", 2.0), "refused"),
        (LegUnanswered(2, "nobody", False, 2.0), "refused"),
        (LegRefused(2, "full", True, False, "", 100.0), "refused"),
    ],
)
def test_only_a_hand_off_that_was_not_touched_is_offered_again(event: SagaEvent, cause: str) -> None:
    """Otherwise the prompt is computed again, and its KV released."""
    saga, effects = run(*CLAIMING, event)
    steps = [e.event for e in effects if isinstance(e, RecordEvent) and isinstance(e.event, RequestStepped)]
    assert steps[0].cause == cause
    expired = isinstance(event, LegRefused) and event.now_s == 100.0
    assert [one.cause for one in steps[1:]] == (["timed out"] if expired and saga.end is None else [])
    kept = cause == "refused" and not expired
    assert (saga.state == "handoff") == kept
    released = CancelAttempt("w1", 1, "r-0-1") in effects
    assert released != kept


def test_a_search_ends_at_its_deadline_and_time_in_the_queue_does_not_count() -> None:
    """503 with the last reason and the router's retry-after."""
    saga, effects = run(OPENED, RouterRefused(1, RouteRefused("full", 7.0), 5.0, PLACE_S_MAX + 4.5))
    assert effects == [PauseSearch(1, 0.1)]
    late = RouterRefused(2, RouteRefused("still full", 7.0), 0.0, PLACE_S_MAX + 5.0)
    saga, effects = run(RetryDue(1, PLACE_S_MAX + 5.0), late, saga=saga)
    [finish] = effects
    assert isinstance(finish, Finish)
    assert finish.error is not None
    assert (finish.error.status, finish.error.retry_after_s) == (503, 7.0)
    assert "still full" in str(finish.error)
    assert saga.state == "ended"


@pytest.mark.parametrize(("sent", "status", "wait_s"), [((), 503, 7.0), ((5,), 502, 0.0)])
def test_a_move_names_the_worker_that_failed(sent: tuple[int, ...], status: int, wait_s: float) -> None:
    """The client sees which failure the request did not survive, and when to try again if it has nothing of the answer."""
    begun = Frame(FrameEntry(1, 0, sent), 0.0)
    saga, effects = run(*DECODING, begun, LegLost(1, "worker w1: gone", 0.0))
    assert effects[0] == CancelAttempt("w1", 1, "r-0-1")
    saga, effects = run(RouterRefused(2, RouteRefused("nobody left", 7.0), 0.0, MOVE_S_MAX), saga=saga)
    [finish] = effects
    assert isinstance(finish, Finish)
    assert finish.error is not None
    assert (finish.error.status, finish.error.retry_after_s) == (status, wait_s)
    assert "w1.1" in str(finish.error)


def test_a_request_that_every_worker_drops_ends() -> None:
    """After so many migrations it is taken for the cause; its client reads why the last worker dropped it."""
    saga, effects = run(*DECODING)
    for move in range(MIGRATIONS_MAX + 1):
        assert saga.end is None
        saga, effects = step(saga, LegLost(saga.attempt.number, "gone", 0.0, died=False))
        if saga.end is None:
            number = saga.attempts
            saga, _ = run(Routed(number, decision(), 0.0, 0.0), LegAccepted(number, 0.0), saga=saga)
        else:
            assert move == MIGRATIONS_MAX
    [finish] = [effect for effect in effects if isinstance(effect, Finish)]
    assert finish.error is not None
    assert finish.error.status == 502
    assert str(finish.error).endswith(f"migrated {MIGRATIONS_MAX} times; last reason: gone.")


def test_a_model_whose_requests_do_not_migrate() -> None:
    """With the limit 0 a request fails with its worker, and says so."""
    saga, _ = run(*DECODING, saga=Saga(replace(SPEC, migrations_max=0)))
    saga, effects = step(saga, LegLost(saga.attempt.number, "gone", 0.0, died=False))
    [finish] = [effect for effect in effects if isinstance(effect, Finish)]
    assert saga.end is not None
    assert finish.error is not None
    assert finish.error.status == 502
    assert "--migration-limit 0" in str(finish.error)


def test_a_late_acceptance_is_cancelled() -> None:
    """Whatever ended or moved the request may have reached the worker before it."""
    for life in ((OPENED, ROUTED, Cancelled()), (OPENED, ROUTED, LegLost(1, "gone", 0.0))):
        _, effects = run(*life, LegAccepted(1, 0.0))
        assert effects[0] == CancelAttempt("w1", 1, "r-0-1")


def excluded(effects: list[Effect]) -> tuple[str, ...]:
    """The incarnations that the only query among these effects leaves out."""
    [ask] = [effect for effect in effects if isinstance(effect, AskRouter)]
    return ask.constraints.exclude


@pytest.mark.parametrize("gone", [False, True])
def test_a_worker_that_refused_is_tried_again_unless_it_is_gone(gone: bool) -> None:
    """A full worker may have room later; a dead engine never has, and no refusal of it counts as a migration."""
    saga, effects = run(OPENED, ROUTED, LegRefused(1, "no", True, False, "", 1.0, gone))
    assert excluded(effects) == ("w1.1",)
    saga, effects = run(RouterRefused(2, RouteRefused("none"), 0.0, 1.1), RetryDue(2, 1.2), saga=saga)
    assert excluded(effects) == (("w1.1",) if gone else ())
    assert saga.migrations == 0


def test_what_is_gone_stays_out_of_later_searches() -> None:
    """Also after another worker has failed in another way, and for the decode leg of a prompt that was prefilled."""
    saga, _ = run(OPENED, ROUTED, LegRefused(1, "dead", True, False, "", 1.0, gone=True))
    moved = Routed(2, decision("", "w2"), 0.0, 1.0), LegAccepted(2, 1.0), LegLost(2, "gone", 2.0)
    saga, effects = run(*moved, saga=saga)
    assert excluded(effects) == ("w1.1", "w2.1")
    saga, effects = run(RouterRefused(3, RouteRefused("none"), 0.0, 3.0), RetryDue(3, 3.1), saga=saga)
    assert excluded(effects) == ("w1.1",)


def test_pauses_between_queries_grow_up_to_a_second() -> None:
    """While an engine starts again for a minute, a router is not asked ten times a second by each request that waits for it."""
    saga, _ = run(OPENED)
    pauses = []
    for number in range(1, 8):
        saga, effects = run(RouterRefused(number, RouteRefused("none"), 0.0, 0.1 * number), saga=saga)
        [pause] = effects
        assert isinstance(pause, PauseSearch)
        pauses.append(pause.seconds)
        saga, _ = run(RetryDue(number, 0.1 * number), saga=saga)
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0]


def test_the_last_query_is_at_the_deadline() -> None:
    """A pause lets no client wait longer for its refusal."""
    late = PLACE_S_MAX - 0.03
    _, effects = run(OPENED, RouterRefused(1, RouteRefused("none"), 0.0, late))
    [pause] = effects
    assert isinstance(pause, PauseSearch)
    assert pause.seconds == pytest.approx(0.03)


def test_a_prompt_that_nobody_decodes_is_computed_again_once() -> None:
    """Where it was only prefilled again, all that decode are away, as after an election of the store of leases: it waits, and is not taken for
    a request that every worker drops. Once one has decoded, the next time is another.
    """
    saga, effects = run(*HANDED, RouterRefused(2, RouteRefused("no decode worker"), 0.0, 1.0))
    assert saga.state == "routing"
    again = (Routed(3, decision("prefill", "w3"), 0.0, 1.0), LegAccepted(3, 1.0))
    later = Handoff("h3", "w3", 1, b"", 4, 10_000)
    handed = Frame(FrameEntry(3, 0, (), "handoff", handoff=later), 1.5)
    saga, effects = run(*again, handed, saga=saga)
    for _ in range(2 * MIGRATIONS_MAX):
        number = saga.attempts
        refused = RouterRefused(number, RouteRefused("no decode worker"), 0.0, 2.0)
        saga, effects = run(refused, saga=saga)
        assert [type(effect) for effect in effects] == [PauseSearch]
        assert saga.state == "handoff"
        saga, effects = run(RetryDue(number, 2.1), saga=saga)
    assert saga.migrations == 1
    number = saga.attempts
    saga, effects = run(
        Routed(number, decision("decode", "w2"), 0.0, 3.0), LegAccepted(number, 3.0), saga=saga
    )
    assert (saga.state, saga.given_up) == ("decode", False)


def test_a_worker_that_could_not_have_the_kv_of_another_is_not_sent_to_it_again() -> None:
    """Their hosts may not reach each other while the edge reaches both: another one decodes, unless there is none."""
    saga, _ = run(*CLAIMING, LegRefused(2, "worker w1, which keeps its KV, is gone", True, True, "", 1.0))
    assert (saga.state, saga.migrations) == ("routing", 1)
    again = Frame(FrameEntry(3, 0, (), "handoff", handoff=HANDOFF), 2.0)
    saga, effects = run(Routed(3, decision("prefill"), 0.0, 2.0), LegAccepted(3, 2.0), again, saga=saga)
    [query] = [effect for effect in effects if isinstance(effect, AskRouter)]
    assert query.constraints.leg == "decode"
    assert query.constraints.exclude == ("w2.1",)
    saga, effects = run(RouterRefused(4, RouteRefused("no other"), 0.0, 2.0), RetryDue(4, 2.1), saga=saga)
    [query] = [effect for effect in effects if isinstance(effect, AskRouter)]
    assert query.constraints.exclude == ()
    assert saga.migrations == 1


# The table of phases: no choice can be stuck or end twice.


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("cause", get_args(Cause))
def test_every_pair_is_either_in_the_table_or_a_mistake(state: SagaState, cause: Cause) -> None:
    """Nothing is guessed: what is not foreseen raises and names itself."""
    if (state, cause) in TRANSITIONS:
        assert after(state, cause) in STATES
    else:
        with pytest.raises(IllegalTransition, match=f"'{cause}' in state '{state}'"):
            after(state, cause)


def test_nothing_leads_out_of_the_end() -> None:
    """A choice ends once."""
    assert not [cause for state, cause in TRANSITIONS if state == "ended"]


@pytest.mark.parametrize("state", [state for state in STATES if state != "ended"])
def test_every_state_can_be_cancelled_fail_and_be_left(state: SagaState) -> None:
    """Whatever a choice does, the client may leave, and there is an error to end with."""
    assert {after(state, "cancelled"), after(state, "failed")} == {"ended"}
    reached, fresh = {state}, [state]
    while fresh:
        fresh = [
            new
            for at in fresh
            for (before, _), new in TRANSITIONS.items()
            if before == at and new not in reached
        ]
        reached |= set(fresh)
    assert {"decode", "ended"} <= reached


def test_setbacks_never_lead_forward() -> None:
    """They lead to a state in which a worker is looked for, so each is followed by another try or an end."""
    assert {new for (_, cause), new in TRANSITIONS.items() if cause in SETBACKS} == {"routing", "handoff"}
    assert [
        state for (state, cause), new in TRANSITIONS.items() if new == "handoff" and cause in SETBACKS
    ] == ["handoff"]


# What a request needs of a worker, and which requests may go on at another one.

FREE = Sampling(10, logprobs=0, logit_bias={1: 1.0}, seed=3)
GUIDED = Sampling(10, guide=Guide("json_object"))
PROCESSED = Sampling(10, processors={"shout": {}})


def test_needs_are_the_capabilities_that_the_engine_must_have() -> None:
    """Nothing for a plain request, so that workers of older releases are asked too."""
    assert required_capabilities(Sampling(10)) == ()
    assert required_capabilities(FREE) == ("logprobs", "logit_bias")
    assert required_capabilities(GUIDED) == ("guide",)
    assert required_capabilities(PROCESSED) == ("processors",)


def test_a_free_answer_moves_at_any_time() -> None:
    """Its tokens are all there is."""
    assert is_migratable(FREE, 0)
    assert is_migratable(FREE, 9)
    # It counts the prompt too, which holds the answer so far after a move.
    assert is_migratable(Sampling(10, repetition_penalty=1.2), 9)
