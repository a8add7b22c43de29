"""`headwater explain REQUEST`: why a request went where it went, as a table."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import aclosing, redirect_stdout
from typing import Any, NamedTuple

import msgspec

from headwater.actors.runtime.ports import Ports
from headwater.events.ports import Log
from headwater.events.snapshot_store import SnapshotStore
from headwater.ops.config.sections import NatsSettings
from headwater.ops.history.explanation import HIDDEN, afterwards, describe, event_line
from headwater.ops.history.requests import StoredDecision, is_attempt_of
from headwater.ops.nats.connect import choose_pool, operator_ports
from headwater.ops.operator.log_reading import (
    FULL,
    ID_FORM,
    WHOLE,
    LifeEvent,
    Told,
    Window,
    batches_with,
    check_id,
    decisions_after,
    find_life,
    first_state,
    is_complete,
    make_again,
    newest_state,
    pieces_after,
    untold,
    windows,
)
from headwater.ops.terminal import Progress
from headwater.router.replay import Reconstructed, Reconstruction
from headwater.router.state import RouterState
from headwater.schemas.events import RequestStepped, WorkerJoined, WorkerLeft
from headwater.schemas.routing import Decision
from headwater.schemas.subjects import pool_kinds


class Explained(NamedTuple):
    """A decision; what the log knew of it later; and the engine of each worker by then."""

    stored: StoredDecision
    after: list[str]
    engines: Mapping[str, str]

    @property
    def decision(self) -> Decision:
        """The decision itself."""
        return self.stored.decision

    @property
    def position(self) -> int:
        """The position at which the pool's log stores it."""
        return self.stored.position


class Account(NamedTuple):
    """All that the logs have of a request: its decisions, its events, and why workers left that it had to leave."""

    decisions: list[Explained]
    life: list[LifeEvent]
    left: list[str]


async def explain(
    nats: NatsSettings, pool: str, request: str, *, every: bool = False, as_json: bool = False
) -> int:
    """Print every decision made for a request, as a table. 1 if the log holds none.

    With `every`, all candidates: those that the log does not keep are recomputed.
    """
    check_id(request)
    async with operator_ports(nats, "explain") as ports:
        pool = await choose_pool(ports, pool)
        # What is told about the log in passing is not part of a document.
        with redirect_stdout(sys.stderr if as_json else sys.stdout):
            report = await account(ports, pool, request, every=every)
    if as_json:
        print(msgspec.json.encode(as_data(pool, request, report)).decode())
    else:
        print("\n".join(lines_of(request, report)))
    return 0 if report.decisions else 1


async def account(ports: Ports, pool: str, request: str, *, every: bool = False) -> Account:
    """What the logs have of a request."""
    log, now_ns = await ports.pool_log(pool), ports.clock.wall_ns()
    with Progress(f"looking for {request} in the request log") as progress:
        life = await find_life(ports.requests, request, now_ns, progress.at)
        progress.what = f"looking for {request} in the log of pool {pool}"
        explained: list[Explained] = []
        for window in await windows(log, request, life, now_ns):
            explained = await decisions_for(log, request, window, progress.at)
            if is_complete(life, [entry.decision for entry in explained]):
                break
    if every and any(is_summarized(entry.decision) for entry in explained):
        explained = await with_all_candidates(log, SnapshotStore(ports.blobs, pool), request, explained)
    left_by = {
        (entry.event.worker, entry.event.epoch) for entry in life if isinstance(entry.event, RequestStepped)
    }
    return Account(explained, life, await why_workers_left(log, left_by))


def lines_of(request: str, report: Account) -> list[str]:
    """The report for people."""
    lines = [
        describe(entry.decision, entry.position, entry.after, entry.engines) for entry in report.decisions
    ]
    lines += [f"  {event_line(entry.event)}" for entry in report.life]
    lines += [f"  {line}" for line in report.left]
    if not report.decisions and report.life:
        lines.append(
            f"no decision for {request}: it ended before a router chose a worker, or that part of the log is gone"
        )
    elif not report.decisions:
        lines.append(f"no decision for {request} in this log; {ID_FORM}")
    return lines


def as_data(pool: str, request: str, report: Account) -> dict[str, Any]:
    """The report for programs: structs as objects with the names of their fields. It has no contents of prompts and answers."""
    decisions = [
        {
            "position": entry.position,
            "router": dict(zip(("name", "epoch"), entry.stored.router, strict=True)),
            "decision": plain(entry.decision),
            "engines": {
                candidate.worker: entry.engines[candidate.worker]
                for candidate in entry.decision.candidates
                if candidate.worker in entry.engines
            },
            "later": entry.after,
        }
        for entry in report.decisions
    ]
    life = [
        {
            "position": entry.position,
            "time_ns": entry.stored_ns,
            "edge": entry.edge,
            "event": type(entry.event).__struct_config__.tag,
            **{name: value for name, value in plain(entry.event).items() if name not in HIDDEN},
        }
        for entry in report.life
    ]
    return {
        "request": request,
        "pool": pool,
        "decisions": decisions,
        "events": life,
        "workers_left": report.left,
    }


def plain(value: Any) -> Any:
    """Structs as objects, whatever form they have in the log; bytes in hexadecimal."""
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, tuple | list):
        return [plain(inner) for inner in value]
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    return value


async def decisions_for(
    log: Log, request: str, window: Window = WHOLE, report: Told = untold
) -> list[Explained]:
    """Each decision about `request` in a part of the log."""
    decisions: list[Explained] = []
    subjects = pool_kinds("route", "load", "shadow")
    async with aclosing(batches_with(log, request, window, subjects, report)) as batches:
        async for message, batch in batches:
            for event in batch.events:
                if isinstance(event, Decision) and is_attempt_of(event.request, request):
                    router = batch.writer, batch.epoch
                    stored = StoredDecision(router, message.position, message.stored_ns, event)
                    decisions.append(Explained(stored, [], {}))
                for explained in decisions:
                    explained.after.extend(afterwards(explained.decision, event))
    if not decisions:
        return []
    joined = await _engines(log, decisions[-1].position)
    return [
        explained._replace(
            engines={worker: engine for at, worker, engine in joined if at < explained.position}
        )
        for explained in decisions
    ]


async def _engines(log: Log, until: int) -> list[tuple[int, str, str]]:
    """(position, worker, engine) of each worker that joined until then. Of all subjects those of the fleet are the quietest."""
    joined: list[tuple[int, str, str]] = []
    async for piece in log.scan(0, until, pool_kinds("fleet")):
        for record in piece.records:
            joined += [
                (record.position, event.worker, event.engine)
                for event in record.batch.events
                if isinstance(event, WorkerJoined)
            ]
    return joined


def is_summarized(decision: Decision) -> bool:
    """Does its record keep only a few of the candidates?"""
    return decision.scored > len(decision.candidates)


async def with_all_candidates(
    log: Log, snapshots: SnapshotStore, request: str, explained: Sequence[Explained]
) -> list[Explained]:
    """The decisions with all their candidates.

    Folds the log from the newest snapshot before the first of them up to where the last was made. If that does not suffice, because decisions
    before them are missing there, the whole log.
    """
    made_at = min(entry.decision.position for entry in explained)
    near = await newest_state(snapshots, log, made_at)
    if near is not None:
        completed = await _recomputed(log, near, request, explained)
        if all(entry is not None and not entry.problem for entry in completed):
            return [_completed(entry, again) for entry, again in zip(explained, completed, strict=True)]
    state = await first_state(snapshots, log)
    if state is None:
        return list(explained)
    completed = await _recomputed(log, state, request, explained)
    return [_completed(entry, again) for entry, again in zip(explained, completed, strict=True)]


async def _recomputed(
    log: Log, state: RouterState, request: str, explained: Sequence[Explained]
) -> list[Reconstructed | None]:
    """All candidates of each decision, from a fold that begins with this state."""
    start, until = state.position, max(entry.position for entry in explained)
    decisions = await decisions_after(log, start, until)
    run = Reconstruction(state, decisions, lambda entry: is_attempt_of(entry.request, request))
    await make_again(run, pieces_after(log, start), until)
    return [run.found.get((entry.stored.router, entry.decision.number)) for entry in explained]


def _completed(explained: Explained, all_of_it: Reconstructed | None) -> Explained:
    if all_of_it is None or all_of_it.problem:
        reason = (
            all_of_it.problem if all_of_it is not None else "this log does not hold all that it was made on"
        )
        return explained._replace(
            after=[f"the other candidates cannot be recomputed: {reason}", *explained.after]
        )
    full_decision = msgspec.structs.replace(explained.decision, candidates=all_of_it.candidates)
    return explained._replace(stored=explained.stored._replace(decision=full_decision))


async def why_workers_left(log: Log, workers: set[tuple[str, int]]) -> list[str]:
    """The first cause that the log has for the end of each of these (worker, epoch)."""
    reasons: dict[tuple[str, int], str] = {}
    if not workers:
        return []
    async for piece in log.scan(0, FULL, pool_kinds("fleet")):
        for _, event in piece.events():
            if isinstance(event, WorkerLeft) and (event.worker, event.epoch) in workers:
                reasons.setdefault((event.worker, event.epoch), event.reason)
    return [f"worker {worker}.{epoch} left: {reason}" for (worker, epoch), reason in reasons.items()]
