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
            found = await account(ports, pool, request, every=every)
    if as_json:
        print(msgspec.json.encode(as_data(pool, request, found)).decode())
    else:
        print("\n".join(lines_of(request, found)))
    return 0 if found.decisions else 1


async def account(ports: Ports, pool: str, request: str, *, every: bool = False) -> Account:
    """What the logs have of a request."""
    log, now_ns = await ports.pool_log(pool), ports.clock.wall_ns()
    with Progress(f"looking for {request} in the request log") as progress:
        life = await find_life(ports.requests, request, now_ns, progress.at)
        progress.what = f"looking for {request} in the log of pool {pool}"
        found: list[Explained] = []
        for window in await windows(log, request, life, now_ns):
            found = await decisions_for(log, request, window, progress.at)
            if is_complete(life, [one.decision for one in found]):
                break
    if every and any(is_summarized(one.decision) for one in found):
        found = await with_all_candidates(log, SnapshotStore(ports.blobs, pool), request, found)
    left_by = {(one.event.worker, one.event.epoch) for one in life if isinstance(one.event, RequestStepped)}
    return Account(found, life, await why_workers_left(log, left_by))


def lines_of(request: str, found: Account) -> list[str]:
    """The report for people."""
    lines = [describe(one.decision, one.position, one.after, one.engines) for one in found.decisions]
    lines += [f"  {event_line(one.event)}" for one in found.life]
    lines += [f"  {line}" for line in found.left]
    if not found.decisions and found.life:
        lines.append(
            f"no decision for {request}: it ended before a router chose a worker, or that part of the log is gone"
        )
    elif not found.decisions:
        lines.append(f"no decision for {request} in this log; {ID_FORM}")
    return lines


def as_data(pool: str, request: str, found: Account) -> dict[str, Any]:
    """The report for programs: structs as objects with the names of their fields. It has no contents of prompts and answers."""
    decisions = [
        {
            "position": one.position,
            "router": dict(zip(("name", "epoch"), one.stored.router, strict=True)),
            "decision": plain(one.decision),
            "engines": {
                candidate.worker: one.engines[candidate.worker]
                for candidate in one.decision.candidates
                if candidate.worker in one.engines
            },
            "later": one.after,
        }
        for one in found.decisions
    ]
    life = [
        {
            "position": one.position,
            "time_ns": one.stored_ns,
            "edge": one.edge,
            "event": type(one.event).__struct_config__.tag,
            **{name: value for name, value in plain(one.event).items() if name not in HIDDEN},
        }
        for one in found.life
    ]
    return {
        "request": request,
        "pool": pool,
        "decisions": decisions,
        "events": life,
        "workers_left": found.left,
    }


def plain(value: Any) -> Any:
    """Structs as objects, whatever form they have in the log; bytes in hexadecimal."""
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, tuple | list):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return value


async def decisions_for(
    log: Log, request: str, window: Window = WHOLE, told: Told = untold
) -> list[Explained]:
    """Each decision about `request` in a part of the log."""
    found: list[Explained] = []
    wanted = pool_kinds("route", "load", "shadow")
    async with aclosing(batches_with(log, request, window, wanted, told)) as batches:
        async for message, batch in batches:
            for event in batch.events:
                if isinstance(event, Decision) and is_attempt_of(event.request, request):
                    router = batch.writer, batch.epoch
                    stored = StoredDecision(router, message.position, message.stored_ns, event)
                    found.append(Explained(stored, [], {}))
                for one in found:
                    one.after.extend(afterwards(one.decision, event))
    if not found:
        return []
    joined = await _engines(log, found[-1].position)
    return [
        one._replace(engines={worker: engine for at, worker, engine in joined if at < one.position})
        for one in found
    ]


async def _engines(log: Log, until: int) -> list[tuple[int, str, str]]:
    """(position, worker, engine) of each worker that joined until then. Of all subjects those of the fleet are the quietest."""
    found: list[tuple[int, str, str]] = []
    async for piece in log.scan(0, until, pool_kinds("fleet")):
        for record in piece.records:
            found += [
                (record.position, event.worker, event.engine)
                for event in record.batch.events
                if isinstance(event, WorkerJoined)
            ]
    return found


def is_summarized(decision: Decision) -> bool:
    """Does its record keep only a few of the candidates?"""
    return decision.scored > len(decision.candidates)


async def with_all_candidates(
    log: Log, snapshots: SnapshotStore, request: str, found: Sequence[Explained]
) -> list[Explained]:
    """The decisions with all their candidates.

    Folds the log from the newest snapshot before the first of them up to where the last was made. If that does not suffice, because decisions
    before them are missing there, the whole log.
    """
    made_at = min(one.decision.position for one in found)
    near = await newest_state(snapshots, log, made_at)
    if near is not None:
        completed = await _recomputed(log, near, request, found)
        if all(one is not None and not one.problem for one in completed):
            return [_completed(one, again) for one, again in zip(found, completed, strict=True)]
    state = await first_state(snapshots, log)
    if state is None:
        return list(found)
    completed = await _recomputed(log, state, request, found)
    return [_completed(one, again) for one, again in zip(found, completed, strict=True)]


async def _recomputed(
    log: Log, state: RouterState, request: str, found: Sequence[Explained]
) -> list[Reconstructed | None]:
    """All candidates of each decision, from a fold that begins with this state."""
    start, until = state.position, max(one.position for one in found)
    decisions = await decisions_after(log, start, until)
    run = Reconstruction(state, decisions, lambda one: is_attempt_of(one.request, request))
    await make_again(run, pieces_after(log, start), until)
    return [run.found.get((one.stored.router, one.decision.number)) for one in found]


def _completed(one: Explained, all_of_it: Reconstructed | None) -> Explained:
    if all_of_it is None or all_of_it.problem:
        reason = (
            all_of_it.problem if all_of_it is not None else "this log does not hold all that it was made on"
        )
        return one._replace(after=[f"the other candidates cannot be recomputed: {reason}", *one.after])
    whole = msgspec.structs.replace(one.decision, candidates=all_of_it.candidates)
    return one._replace(stored=one.stored._replace(decision=whole))


async def why_workers_left(log: Log, workers: set[tuple[str, int]]) -> list[str]:
    """The first cause that the log has for the end of each of these (worker, epoch)."""
    found: dict[tuple[str, int], str] = {}
    if not workers:
        return []
    async for piece in log.scan(0, FULL, pool_kinds("fleet")):
        for _, event in piece.events():
            if isinstance(event, WorkerLeft) and (event.worker, event.epoch) in workers:
                found.setdefault((event.worker, event.epoch), event.reason)
    return [f"worker {worker}.{epoch} left: {reason}" for (worker, epoch), reason in found.items()]
