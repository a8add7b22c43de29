"""`headwater stuck`: open requests that make no progress, what each waits for, and the remedy."""

import sys
from typing import Final

import msgspec

from headwater.actors.runtime.ports import Ports
from headwater.actors.runtime.tables import CardTable, LeaseTable
from headwater.ops.config.sections import NatsSettings
from headwater.ops.debug.places import PoolLog, open_log, state_at
from headwater.ops.history.requests import request_of
from headwater.ops.history.stuck import OpenRequest, OpenRequests, Stuck, Surroundings, stuck_requests
from headwater.ops.nats.connect import choose_pool, operator_ports
from headwater.ops.terminal import Progress, iso_time
from headwater.schemas.events import LoadReported
from headwater.schemas.routing import Decision
from headwater.schemas.subjects import ANY, pool_subject

WINDOW_NS: Final = 3_600_000_000_000
"""The part of the request log that is read at first; what edges say is open before that is read, too."""

REPORTS_NS: Final = 60_000_000_000
"""How far back load reports are looked for."""


async def stuck(nats: NatsSettings, pool: str, quiet_s: float, *, as_json: bool) -> int:
    """Print the requests of the pool without progress. 1 if there are any."""
    async with operator_ports(nats, "stuck") as ports:
        return await show(ports, await choose_pool(ports, pool), quiet_s, as_json=as_json)


async def show(ports: Ports, pool: str, quiet_s: float = 10.0, *, as_json: bool = False) -> int:
    """See `stuck`."""
    log = await open_log(ports, pool)
    requests = await _of_pool(ports, pool, await open_requests(ports, log.now_ns()))
    around = await surroundings(ports, pool, log, requests)
    # A request without a decision in this pool, on a worker of another one, is that pool's.
    pool_requests = [request for request in requests if not _is_elsewhere(request, around)]
    stuck = stuck_requests(pool_requests, around, round(quiet_s * 1e9))
    if as_json:
        document = {"pool": pool, "time": iso_time(around.now_ns), "open": len(pool_requests), "stuck": stuck}
        print(msgspec.json.encode(document).decode())
    else:
        print(as_text(pool, len(pool_requests), stuck, quiet_s))
    sys.stdout.flush()
    return 1 if stuck else 0


async def open_requests(ports: Ports, now_ns: int) -> list[OpenRequest]:
    """The open requests of all edges at a time that is not long ago."""
    log = ports.requests
    bounds = await log.bounds()
    start = await log.position_at(now_ns - WINDOW_NS)
    while True:
        folded = OpenRequests()
        with Progress("reading the request log") as progress:
            async for piece in log.scan(start, bounds.last):
                for record in piece.records:
                    folded.fold(record)
                    progress.at(record.position - start, bounds.last - start)
        earliest = min([since for since in folded.since.values() if since >= 0], default=start)
        if max(earliest, bounds.first - 1) >= start:
            return list(folded.open.values())
        start = max(earliest, bounds.first - 1)


async def _of_pool(ports: Ports, pool: str, requests: list[OpenRequest]) -> list[OpenRequest]:
    """Those whose model is not known to be served by another pool."""
    cards = await CardTable(ports.cards).models()
    others = {name for card in cards if card.pool != pool for name in (card.name, *card.aliases)}
    pool_models = {name for card in cards if card.pool == pool for name in (card.name, *card.aliases)}
    return [request for request in requests if request.model not in others - pool_models]


def _is_elsewhere(request: OpenRequest, around: Surroundings) -> bool:
    leases = {entry.name: entry for entry in around.leases or () if entry.kind == "worker"}
    named = [entry.worker for entry in request.choices.values() if entry.worker]
    return bool(named) and all(
        name not in around.workers and name in leases and leases[name].pool != around.pool for name in named
    )


async def surroundings(ports: Ports, pool: str, log: PoolLog, requests: list[OpenRequest]) -> Surroundings:
    """The state of the pool now, and the newest decision for each request."""
    last = (await log.log.bounds()).last
    state = await state_at(log, last)
    request_ids = {request.id for request in requests}
    decisions: dict[str, Decision] = {}
    decided_ns: dict[str, int] = {}
    if requests:
        start = await log.log.position_at(min(request.accepted_ns for request in requests) - 1)
        async for piece in log.log.scan(start, last, (pool_subject(ports.ns, pool, "route", ANY),)):
            for record, event in piece.events():
                if isinstance(event, Decision) and (name := request_of(event.request)) in request_ids:
                    decisions[name], decided_ns[name] = event, record.stored_ns
    since_ns = log.now_ns() - REPORTS_NS
    reported = await _reported(ports, pool, log, since_ns, last)
    return Surroundings(
        pool,
        log.now_ns(),
        state.loads.workers,
        frozenset(state.cold),
        tuple(await LeaseTable(ports.leases).read_all()),
        {**dict.fromkeys(state.loads.workers, since_ns), **reported},
        decisions,
        decided_ns,
    )


async def _reported(ports: Ports, pool: str, log: PoolLog, since_ns: int, last: int) -> dict[str, int]:
    """When each worker reported its load last, of those that did since a time."""
    reported: dict[str, int] = {}
    start = await log.log.position_at(since_ns)
    async for piece in log.log.scan(start, last, (pool_subject(ports.ns, pool, "load", ANY),)):
        for record in piece.records:
            if any(isinstance(event, LoadReported) for event in record.batch.events):
                reported[record.batch.writer] = record.stored_ns
    return reported


def as_text(pool: str, count: int, stuck: list[Stuck], quiet_s: float) -> str:
    """The report for people."""
    if not stuck:
        return f"pool {pool}: each of {count} open requests had an event in the last {quiet_s:g} s"
    lines = [f"pool {pool}: {len(stuck)} of {count} open requests make no progress"]
    for report in stuck:
        head = f"{report.request} ({report.endpoint} of {report.edge}, {report.prompt_tokens} prompt tokens)"
        lines.append(f"{head}: no event for {report.quiet_ns / 1e9:.1f} s")
        lines += [f"  {fact}" for fact in report.facts]
        for waiting in report.waiting:
            choice = f"choice {waiting.choice}: " if len(report.waiting) > 1 else ""
            lines.append(
                f"  {choice}{waiting.state} since {iso_time(waiting.since_ns)}: waits for {waiting.waits_for}"
            )
            lines += [f"    {fact}" for fact in waiting.facts]
            lines.append(f"    remedy: {waiting.remedy}")
    return "\n".join(lines)
