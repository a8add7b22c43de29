"""`headwater explain REQUEST`: why a request went where it went, as a table."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from headwater.actors.runtime.persistence import Ports
from headwater.events.ports import Log
from headwater.events.snapshot_store import SnapshotStore
from headwater.ops.config.nats import NatsSettings
from headwater.ops.config.setting import ConfigError
from headwater.ops.history.explanation import afterwards, describe, event_line
from headwater.ops.nats.connect import operator_ports
from headwater.ops.nats.pool_choice import choose_pool
from headwater.ops.operator.log import decisions_after, first_state, pieces_after
from headwater.router.fold.state import in_order
from headwater.router.replay import Incarnation, Reconstructed, Reconstruction
from headwater.schemas.events.fleet import WorkerJoined, WorkerLeft
from headwater.schemas.events.request import (
    RequestStepped,
)
from headwater.schemas.events.route import Decision


class Explained(NamedTuple):
    """A decision of a router, stored at a log position; what the log knew of it later; and the engine of each worker by then."""

    router: Incarnation
    position: int
    decision: Decision
    after: list[str]
    engines: Mapping[str, str]


async def explain(nats: NatsSettings, pool: str, request: str, *, every: bool = False) -> int:
    """Print every decision made for a request, as a table. 1 if the log holds none.

    With `every`, all candidates: those that the log does not keep are recomputed.
    """
    if not request.strip():
        raise ConfigError("REQUEST is empty: give a request id, as in the header x-request-id")
    async with operator_ports(nats, "explain") as ports:
        pool = await choose_pool(ports, pool)
        log = await ports.pool_log(pool)
        found = await decisions_for(log, request)
        if every and any(is_summarized(one.decision) for one in found):
            found = await with_all_candidates(log, SnapshotStore(ports.blobs, pool), request, found)
        for one in found:
            print(describe(one.decision, one.position, one.after, one.engines))
        left_by = await _print_life(ports, request)
        for line in await why_workers_left(log, left_by):
            print(f"  {line}")
    if not found:
        print(f"no decision for {request} in this log; ids look like chatcmpl-… (header x-request-id)")
    return 0 if found else 1


async def decisions_for(log: Log, request: str) -> list[Explained]:
    """Each decision about `request`."""
    found: list[Explained] = []
    engines: dict[str, str] = {}
    async for piece in log.read(0, follow=False):
        for record in piece.records:
            for event in record.batch.events:
                if isinstance(event, WorkerJoined):
                    engines[event.worker] = event.engine
                if isinstance(event, Decision) and is_about(event, request):
                    router = record.batch.writer, record.batch.epoch
                    found.append(Explained(router, record.position, event, [], dict(engines)))
                for one in found:
                    one.after.extend(afterwards(one.decision, event))
    return found


def is_summarized(decision: Decision) -> bool:
    """Does its record keep only a few of the candidates?"""
    return decision.scored > len(decision.candidates)


async def with_all_candidates(
    log: Log, snapshots: SnapshotStore, request: str, found: Sequence[Explained]
) -> list[Explained]:
    """The decisions with all their candidates. Folds the log up to where the last of them was made."""
    state = await first_state(snapshots, log)
    if state is None:
        return list(found)
    start = state.position
    run = Reconstruction(state, await decisions_after(log, start), lambda one: is_about(one, request))
    run.start()
    async for piece in pieces_after(log, start):
        for message in in_order(piece):
            run.step(message)
        if not run.left:
            break
    return [_completed(one, run.found.get((one.router, one.decision.number))) for one in found]


def _completed(one: Explained, all_of_it: Reconstructed | None) -> Explained:
    if all_of_it is None or all_of_it.problem:
        reason = (
            all_of_it.problem if all_of_it is not None else "this log does not hold all that it was made on"
        )
        return one._replace(after=[f"the other candidates cannot be recomputed: {reason}", *one.after])
    whole = msgspec.structs.replace(one.decision, candidates=all_of_it.candidates)
    return one._replace(decision=whole)


def is_about(decision: Decision, request: str) -> bool:
    """Is it one of the request's decisions? Each has its choice and attempt behind the request's id."""
    return decision.request == request or decision.request.startswith(request + "-")


async def why_workers_left(log: Log, workers: set[tuple[str, int]]) -> list[str]:
    """The first cause that the log has for the end of each of these (worker, epoch)."""
    found: dict[tuple[str, int], str] = {}
    if not workers:
        return []
    async for piece in log.read(0, follow=False):
        for record in piece.records:
            for event in record.batch.events:
                if isinstance(event, WorkerLeft) and (event.worker, event.epoch) in workers:
                    found.setdefault((event.worker, event.epoch), event.reason)
    return [f"worker {worker}.{epoch} left: {reason}" for (worker, epoch), reason in found.items()]


async def _print_life(ports: Ports, request: str) -> set[tuple[str, int]]:
    """Print the request's events; returns the workers, with their epochs, that it had to leave."""
    left_by: set[tuple[str, int]] = set()
    async for piece in ports.requests.read(0, follow=False):
        for record in piece.records:
            for event in record.batch.events:
                if getattr(event, "request", None) == request:
                    print(f"  {event_line(event)}")
                    if isinstance(event, RequestStepped):
                        left_by.add((event.worker, event.epoch))
    return left_by
