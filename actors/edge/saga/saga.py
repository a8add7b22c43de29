"""The saga of one choice of one request: place it, stream it, move it when its worker dies, end it once. Pure.

`step` maps a state and an event to the next state and the effects to carry out (`headwater.actors.edge.saga.driver`
does). Which phase follows which is in `headwater.actors.edge.saga.types`. Frames are taken by position: tokens
that were already received are skipped, a gap is queried. So each token is emitted once, in order, whatever fails. A
move sends the prompt with all tokens so far to another worker. Where the router splits a request, the prompt goes to
one worker first; its KV is then claimed, once, by the worker that decodes. If that fails the prompt is computed again.

An engine that continues an answer gets the tokens so far as part of the prompt. What the first engine kept in addition
is lost: the state of a grammar, the counts of a logits processor. The second engine would start from scratch and
produce an answer that the client did not ask for, so such a request ends with an error instead.

A request that engines die of would end one incarnation after the other, and with each what else ran there. It is not
tried again after `DEATHS_MAX`.
"""

from typing import Final

from msgspec.structs import replace

from headwater.actors.edge.saga.types import (
    MOVE_S_MAX,
    PLACE_S_MAX,
    SETBACKS,
    Aborted,
    AskRouter,
    AskStatus,
    Attempt,
    CancelAttempt,
    Cancelled,
    Cause,
    ChoiceSpec,
    Detach,
    Dispatch,
    Effect,
    Emit,
    End,
    Finish,
    Frame,
    HolderLost,
    KvHolder,
    LegAccepted,
    LegFinished,
    LegLost,
    LegRefused,
    LegUnanswered,
    Opened,
    PauseSearch,
    Placement,
    RecordEvent,
    RetryDue,
    RouteAnswer,
    Routed,
    RouterRefused,
    RouterUnanswered,
    Saga,
    SagaEvent,
    StopMatched,
    TimedOut,
    after,
)
from headwater.actors.http import errors
from headwater.schemas.events import RequestPrefilled, RequestRouted, RequestStepped
from headwater.schemas.inference import FrameEntry, Handoff, Leg, Sampling

DEATHS_MAX: Final = 3
"""Incarnations of workers that may end with a request; then it counts as the cause."""


def is_migratable(sampling: Sampling, emitted: int) -> bool:
    """Return whether a request with `emitted` tokens can continue elsewhere; before the first token it always can."""
    return not emitted or not _engine_state(sampling)


def migration_blocker(sampling: Sampling, emitted: int) -> str:
    """The error message for a request that cannot move."""
    return f"{_engine_state(sampling)} after {emitted} tokens was lost with the worker, so it cannot continue; retry"


def _engine_state(sampling: Sampling) -> str:
    """Return what the engine derived from the tokens that it generated, and another one would start from scratch; "": nothing.

    A repetition penalty counts the prompt too, which contains the answer so far after a move.
    """
    if sampling.guide is not None:
        return "its grammar's state"
    if sampling.processors:
        return "the state of its logits processors"
    if sampling.presence_penalty or sampling.frequency_penalty:
        return "the counts of its presence and frequency penalties"
    if sampling.thinking_budget is not None:
        return "the count of its thinking budget"
    return ""


def is_blamed(finish: str, received: int) -> bool:
    """Does the end of a worker's incarnation count against a request that it had sent `received` tokens of?

    `finish` as in `FrameEntry`, "lost" for a worker that is. If the engine says that it died of this request, yes. If
    it merely died, only where it had sent nothing: a request that breaks engines breaks them before its next token, and
    one that streamed was most likely a bystander.
    """
    return finish == "fatal" or (finish in ("died", "lost") and not received)


FAILURES: Final = ("error", "died", "fatal")
"""How a leg ends whose engine failed, as in `FrameEntry.finish`."""


def is_gone(finish: str) -> bool:
    """Did the worker say that its engine is dead? A worker that is merely "lost" may come back: its connection may have failed."""
    return finish in ("died", "fatal")


# Transitions.

REASON_CHARACTERS_MAX: Final = 300

Effects = list[Effect]


def step(saga: Saga, event: SagaEvent) -> tuple[Saga, Effects]:
    """The state after `event`, and what to do, in this order. Total: an event that comes too late changes nothing."""
    if type(event) is Frame:
        return _on_frame(saga, event)
    effects: Effects = []
    if saga.end is not None:
        if isinstance(event, LegAccepted) and _is_awaited(saga, "dispatch", event.number):
            # The cancellation at the end may have reached the worker before the request.
            _cancel(saga.attempt, effects)
        return saga, effects
    match event:
        case Opened() if saga.attempts == 0:
            placement = Placement(event.now_s + PLACE_S_MAX, event.pinned)
            saga = replace(saga, placement=placement, attempts=event.attempts)
            if event.decided is not None:
                routed = Routed(saga.attempts, event.decided, 0.0, event.now_s)
                saga = _dispatch(saga, routed, effects)
            else:
                saga = _ask_router(saga, event.now_s, effects)
        case Routed() | RouterRefused() | RouterUnanswered() if _is_awaited(saga, "route", event.number):
            saga = _on_route(saga, event, effects)
        case RetryDue() if _is_awaited(saga, "pause", event.number):
            saga = _ask_router(saga, event.now_s, effects)
        case LegAccepted() | LegRefused() | LegUnanswered() if _is_awaited(saga, "dispatch", event.number):
            saga = _on_reply(saga, event, effects)
        case LegFinished() if saga.streaming:
            saga = _on_finished(saga, event, effects)
        case LegLost() if saga.streaming and event.number == saga.attempt.number:
            saga = _lose(saga, "lost", event.reason, event.now_s, effects, "lost" if event.died else "")
        case HolderLost() if saga.awaited is not None and event.attempt == saga.awaited.attempt:
            saga = _lose(saga, "lost", event.reason, event.now_s, effects, event.finish, saga.awaited)
        case TimedOut() if saga.state == "prefill" and event.number == saga.attempt.number:
            reason = f"worker {saga.attempt.worker}: its prefill takes too long"
            saga = _lose(saga, "timed out", reason, event.now_s, effects)
        case StopMatched() if saga.state == "decode":
            _cancel(saga.attempt, effects)
            saga = _end(saga, "finished", "stop", effects)
        case Cancelled():
            if saga.streaming:
                _cancel(saga.attempt, effects)
            saga = _end(saga, "cancelled", "cancelled", effects)
        case Aborted():
            saga = _fail(saga, event.error, effects)
        case _:
            pass
    return saga, effects


def _is_awaited(saga: Saga, awaited_step: str, number: int) -> bool:
    return saga.awaits == awaited_step and saga.attempts == number


# Dispatch: query the router and send to the worker that it names, until one takes the leg.


def attempt_name(spec: ChoiceSpec, number: int) -> str:
    """The name of an attempt of a choice, in every log."""
    return f"{spec.request}-{spec.index}-{number}"


def left_out(search: Placement) -> tuple[str, ...]:
    """The incarnations that the next query of a search leaves out."""
    return (*search.gone, *(one for one in search.exclude if one not in search.gone))


def _ask_router(saga: Saga, now_s: float, effects: Effects) -> Saga:
    placement, holder = saga.placement, saga.holder
    assert placement is not None
    if (
        saga.state == "handoff"
        and holder is not None
        and holder.handoff is not None
        and now_s >= holder.until_s
    ):
        reason = f"no worker claimed the prefilled prompt in time: {placement.reason}"
        saga, holder = _drop_handoff(saga, "timed out", reason, effects), None
    if saga.migrations > saga.spec.migrations_max:
        return _fail(saga, errors.migrated_too_often(saga.spec.migrations_max, placement.reason), effects)
    number = saga.attempts + 1
    decodes = saga.state == "handoff" and holder is not None
    constraints = replace(
        saga.spec.constraints,
        pinned="" if decodes else placement.pinned,
        exclude=left_out(placement),
        leg="decode" if decodes else "",
        pairs_with=holder.pairs_with if decodes and holder is not None else "",
        revision=holder.revision if decodes and holder is not None else saga.spec.constraints.revision,
        # Before the first token a request may begin anywhere: only its tokens bind it.
        tokenizer=saga.spec.tokenizer if saga.emitted else "",
    )
    # A request that a router let through once does not queue again, nor do choices of the same prompt.
    may_wait = saga.decision is None and not placement.pinned
    effects.append(AskRouter(number, attempt_name(saga.spec, number), constraints, may_wait))
    return replace(saga, attempts=number, awaits="route")


def _on_route(saga: Saga, event: RouteAnswer, effects: Effects) -> Saga:
    assert saga.placement is not None
    has_others = bool(saga.placement.exclude)
    placement, error = saga.placement.answered(event)
    saga = replace(saga, placement=placement)
    if isinstance(event, Routed):
        return _dispatch(saga, event, effects)
    if error is not None:
        return _not_placed(saga, error, effects)
    if isinstance(event, RouterRefused) and not has_others and saga.state == "handoff" and not saga.given_up:
        # No worker decodes now. Another may compute the prompt again, which takes less than to wait for one that decodes. Once: where the
        # prompt was only prefilled again, all of them are away for a moment, as after an election of the store that leases are in.
        reason = f"no worker can decode the prefilled prompt: {event.refusal.reason}"
        saga = _drop_handoff(replace(saga, given_up=True), "spent", reason, effects)
        return _ask_router(saga, event.now_s, effects)
    effects.append(PauseSearch(saga.attempts, placement.pause_s(event.now_s)))
    return replace(saga, placement=placement.paused(), awaits="pause")


def _dispatch(saga: Saga, event: Routed, effects: Effects) -> Saga:
    decision, holder = event.decision, saga.holder
    handoff = holder.handoff if decision.leg == "decode" and holder is not None else None
    # Without KV to claim, as after a prefill leg that left nothing, the worker computes the prompt itself.
    fits = handoff is not None if decision.leg == "decode" else saga.state == "routing"
    leg: Leg = decision.leg if fits else ""
    name = attempt_name(saga.spec, saga.attempts)
    attempt = Attempt(saga.attempts, name, decision.worker, decision.epoch, leg, event.now_s, saga.emitted)
    effects.append(Dispatch(attempt, handoff))
    return replace(saga, decision=decision, attempt=attempt, streaming=True, awaits="dispatch")


def _on_reply(saga: Saga, event: LegAccepted | LegRefused | LegUnanswered, effects: Effects) -> Saga:
    attempt = saga.attempt
    if isinstance(event, LegAccepted):
        if saga.streaming:
            return _accept(saga, effects)
        # It was lost before it replied; whatever it runs is not received any more.
        _cancel(attempt, effects)
        reason = f"worker {attempt.worker} was lost"
    else:
        reason = event.reason
        if saga.streaming:
            with_handoff = attempt.leg == "decode"
            if isinstance(event, LegRefused):
                spent = with_handoff and event.spent
            else:
                spent = with_handoff and event.delivered
                if event.delivered:
                    _cancel(attempt, effects)
            saga = _turn_down(saga, "spent" if spent else "refused", reason, effects)
            if isinstance(event, LegRefused) and not event.retryable:
                rejection = errors.rejected(reason, event.param or saga.spec.guide_param)
                return _not_placed(saga, rejection, effects)
    assert saga.placement is not None
    gone = isinstance(event, LegRefused) and event.gone
    placement = saga.placement.refused_by_worker(attempt.worker, attempt.epoch, reason, gone=gone)
    saga = replace(saga, gone=placement.gone)
    error = placement.expired(event.now_s)
    if error is not None:
        return _not_placed(saga, error, effects)
    return _ask_router(replace(saga, placement=placement), event.now_s, effects)


def _accept(saga: Saga, effects: Effects) -> Saga:
    """The worker has the leg: its reply says so, or a frame that overtook the reply."""
    attempt, holder = saga.attempt, saga.holder
    saga = _go(saga, "prefill accepted" if attempt.leg == "prefill" else "accepted", effects)
    handoff = holder.handoff.id if attempt.leg == "decode" and holder and holder.handoff else ""
    place = (attempt.name, attempt.worker, attempt.epoch, saga.emitted, attempt.leg, handoff)
    effects.append(RecordEvent(RequestRouted(saga.spec.request, saga.spec.index, *place)))
    given_up = saga.given_up and attempt.leg == "prefill"
    return replace(saga, attempt=replace(attempt, accepted=True), awaits="", given_up=given_up)


def _turn_down(saga: Saga, cause: Cause, reason: str, effects: Effects) -> Saga:
    """The worker did not take its leg. `spent`: no other worker can use its hand-off either."""
    saga = _detach(saga, effects)
    if cause == "spent":
        attempt, holder = saga.attempt, saga.holder
        if holder is not None:
            pair = (f"{holder.worker}.{holder.epoch}", f"{attempt.worker}.{attempt.epoch}")
            saga = replace(saga, unfetched=(*saga.unfetched, pair))
        return _drop_handoff(saga, cause, reason, effects)
    return _go(saga, cause, effects, reason)


def _drop_handoff(saga: Saga, cause: Cause, reason: str, effects: Effects) -> Saga:
    """Give up the prompt's KV: it must be computed again."""
    saga, handoff = _release(saga, effects)
    return _go(replace(saga, migrations=saga.migrations + 1), cause, effects, reason, handoff)


def _not_placed(saga: Saga, error: errors.ApiError, effects: Effects) -> Saga:
    origin = saga.placement.origin if saga.placement is not None else ""
    if origin:
        error = errors.not_migrated(origin, error, has_begun=saga.emitted > 0)
    return _fail(saga, error, effects)


# Streaming: frames, and what ends or interrupts them.


def _on_frame(saga: Saga, event: Frame) -> tuple[Saga, Effects]:
    effects: Effects = []
    if not saga.streaming:
        return saga, effects
    entry, attempt = event.entry, saga.attempt
    if not attempt.accepted:
        saga = _accept(saga, effects)
    skip = saga.emitted - attempt.first - entry.position
    if skip < 0:
        effects.append(AskStatus())
        return saga, effects
    # A decode leg counts the transferred prompt as cached: what was cached before, its prefill leg said. One that
    # waited in a room states what its prefill leg found, which had not begun when its frames were last received.
    transferred = attempt.leg == "decode" and bool(saga.prefilled_by) and saga.awaited is None
    if saga.cached_tokens < 0 <= entry.cached_tokens and not transferred:
        saga = replace(saga, cached_tokens=entry.cached_tokens)
    if attempt.leg:
        if attempt.leg == "prefill":
            return _on_prefill_frame(saga, entry, event.now_s, effects), effects
        if entry.tokens:
            # The KV was transferred, so its holder may free it.
            saga, _ = _release(saga, effects, fetched=True)
    tokens, logprobs = entry.tokens, entry.logprobs
    if skip:
        tokens, logprobs = tokens[skip:], logprobs[skip:]
    if tokens:
        effects.append(Emit(tokens, logprobs))
        return replace(saga, emitted=saga.emitted + len(tokens)), effects
    return saga, effects


def _on_prefill_frame(saga: Saga, entry: FrameEntry, now_s: float, effects: Effects) -> Saga:
    if entry.handoff is not None or entry.finish == "handoff":
        return _on_prefilled(saga, entry.handoff, now_s, effects)
    if entry.tokens:
        reason = f"worker {saga.attempt.worker}: it sent tokens for a prefill leg"
        return _lose(saga, "lost", reason, now_s, effects)
    return saga


def _on_prefilled(saga: Saga, handoff: Handoff | None, now_s: float, effects: Effects) -> Saga:
    attempt, spec = saga.attempt, saga.spec
    until_s = now_s + handoff.expires_ms / 1000 if handoff is not None else 0.0
    pairs_with = saga.decision.pairs_with if saga.decision is not None else ""
    revision = saga.decision.revision if saga.decision is not None else ""
    holder = KvHolder(attempt.worker, attempt.epoch, attempt.name, pairs_with, handoff, until_s, revision)
    follows = handoff is not None and handoff.choreography == "room"
    saga = _go(_detach(saga, effects, follows=follows), "prefilled", effects)
    handoff_fields = (handoff.id, handoff.expires_ms) if handoff is not None else ("", 0)
    prefill_ms = round((now_s - attempt.began_s) * 1000, 3)
    prefilled = RequestPrefilled(
        spec.request,
        spec.index,
        attempt.worker,
        attempt.epoch,
        handoff_fields[0],
        prefill_ms,
        handoff_fields[1],
    )
    effects.append(RecordEvent(prefilled))
    origin = f"No worker decodes the prompt that worker {attempt.worker} prefilled"
    prefill_place = f"{attempt.worker}.{attempt.epoch}"
    exclude = tuple(dict.fromkeys(other for place, other in saga.unfetched if place == prefill_place))
    placement = Placement(now_s + MOVE_S_MAX, exclude=exclude, gone=saga.gone, origin=origin)
    saga = replace(saga, holder=holder, prefilled_by=attempt.worker, placement=placement)
    return _ask_router(saga, now_s, effects)


def _on_finished(saga: Saga, event: LegFinished, effects: Effects) -> Saga:
    if not saga.attempt.accepted:
        saga = _accept(saga, effects)
    if saga.received < event.position:
        return saga
    worker = saga.attempt.worker
    if event.finish == "rejected":
        saga = _detach(saga, effects)
        return _fail(saga, errors.rejected(event.detail, event.param or saga.spec.guide_param), effects)
    if event.finish in ("stop", "length") and saga.state == "decode":
        return _end(saga, "finished", "stop" if event.finish == "stop" else "length", effects)
    reason = f"worker {worker}: {event.detail or 'it aborted the request'}"
    return _lose(saga, "lost", reason, event.now_s, effects, event.finish)


def _lose(
    saga: Saga,
    cause: Cause,
    reason: str,
    now_s: float,
    effects: Effects,
    finish: str = "",
    lost: Attempt | KvHolder | None = None,
) -> Saga:
    """The worker (`lost`, or that of the attempt) died, aborted the request or takes too long: migrate it, unless it is what workers die of."""
    attempt = saga.attempt
    failed = lost or attempt
    if is_blamed(finish, saga.received):
        saga = saga.died_on(failed.worker, failed.epoch)
        if saga.deaths >= DEATHS_MAX:
            return _fail(saga, errors.ended_workers(saga.deaths, reason), effects)
    _cancel(attempt, effects)
    if not attempt.accepted:
        # The reply to the dispatch, which is still awaited, continues the search.
        return _turn_down(saga, "spent" if attempt.leg == "decode" else "refused", reason, effects)
    saga, handoff = _release(_detach(saga, effects), effects)
    saga = _go(replace(saga, migrations=saga.migrations + 1), cause, effects, reason, handoff)
    sampling = saga.spec.sampling
    if saga.migrations > saga.spec.migrations_max:
        return _fail(saga, errors.migrated_too_often(saga.spec.migrations_max, reason), effects)
    if saga.emitted >= sampling.max_tokens:
        return _end(saga, "finished", "length", effects)
    if not is_migratable(sampling, saga.emitted):
        blocker = migration_blocker(sampling, saga.emitted)
        return _fail(saga, errors.upstream_failed(f"{reason}; {blocker}."), effects)
    origin = f"Worker {failed.worker}.{failed.epoch} failed and no other worker took the request"
    placement = Placement(now_s + MOVE_S_MAX, gone=saga.gone, origin=origin)
    if cause == "timed out" or finish in ("lost", *FAILURES):
        placement = placement.refused_by_worker(failed.worker, failed.epoch, "", gone=is_gone(finish))
        saga = replace(saga, gone=placement.gone)
    return _ask_router(replace(saga, placement=placement), now_s, effects)


# Common steps.


def _fail(saga: Saga, error: errors.ApiError, effects: Effects) -> Saga:
    if saga.streaming:
        _cancel(saga.attempt, effects)
    return _end(saga, "failed", "error", effects, error)


def _end(saga: Saga, cause: Cause, end: End, effects: Effects, error: errors.ApiError | None = None) -> Saga:
    saga, _ = _release(_detach(saga, effects), effects)
    saga = _go(saga, cause, effects)
    effects.append(Finish(end, error))
    return replace(saga, end=end)


def _go(saga: Saga, cause: Cause, effects: Effects, reason: str = "", handoff: str = "") -> Saga:
    """Change the phase. A setback is recorded, with the hand-off that was given up with it."""
    state = after(saga.state, cause)
    if cause in SETBACKS:
        spec, attempt = saga.spec, saga.attempt
        worker, epoch, why = attempt.worker, attempt.epoch, reason[:REASON_CHARACTERS_MAX]
        stepped = RequestStepped(
            spec.request, spec.index, saga.state, cause, state, worker, epoch, why, handoff
        )
        effects.append(RecordEvent(stepped))
    return replace(saga, state=state)


def _detach(saga: Saga, effects: Effects, *, follows: bool = False) -> Saga:
    if not saga.streaming:
        return saga
    effects.append(Detach(follows))
    return replace(saga, streaming=False)


def _release(saga: Saga, effects: Effects, *, fetched: bool = False) -> tuple[Saga, str]:
    """Release the KV that a prefill leg left, if any; returns the hand-off's name too."""
    holder = saga.holder
    if holder is None:
        return saga, ""
    saga = replace(saga, holder=None)
    if holder.handoff is None:
        return saga, ""
    effects.append(CancelAttempt(holder.worker, holder.epoch, holder.attempt, fetched))
    return saga, holder.handoff.id


def _cancel(attempt: Attempt, effects: Effects) -> None:
    effects.append(CancelAttempt(attempt.worker, attempt.epoch, attempt.name))
