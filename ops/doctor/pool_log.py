"""Facts of one pool: the folded state of its log now, and what the latest part of it and of the request log say."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Final

from headwater.actors.runtime.persistence import Ports
from headwater.events.ports import Record
from headwater.ops.debug.places import open_log, state_at
from headwater.ops.doctor.facts import ClockFacts, PoolFacts, Served
from headwater.ops.history.findings import BEFORE_NS, findings
from headwater.ops.history.fleet import FleetAt, Mark, mark_of
from headwater.ops.history.requests import RequestTable
from headwater.schemas.events.fleet import LoadReported, WorkerJoined
from headwater.schemas.events.kv import BlocksStored
from headwater.schemas.events.route import Decision
from headwater.schemas.hashing import unpack_hashes

SETTLED_NS: Final = 3_000_000_000
"""A prompt that was computed so long ago has been announced: events follow within milliseconds."""

RECORDS_MAX: Final = 200_000
"""Messages of the log that are looked at: a busy pool writes so many in a few minutes."""


async def pool_facts(ports: Ports, pool: str, hosts: Mapping[str, str], now_ns: int) -> PoolFacts:
    """Read a pool's logs. `hosts` are the machines of its processes, by name; `now_ns` is the server's time."""
    log = await open_log(ports, pool)
    bounds = await log.log.bounds()
    if bounds.last < bounds.first:
        return PoolFacts(pool)
    state = await state_at(log, bounds.last)
    start = max(await log.log.position_at(now_ns - BEFORE_NS), bounds.first - 1, bounds.last - RECORDS_MAX)
    recent = RecentLog()
    async for piece in log.log.scan(start, bounds.last):
        for record in piece.records:
            recent.take(record)
    requests = await _requests(ports, recent, now_ns)
    fleet = FleetAt(bounds.last, max(recent.last_ns, now_ns), state.loads)
    epochs = {name: worker.epoch for name, worker in state.loads.workers.items()}
    return PoolFacts(
        pool,
        tuple(state.loads.workers.values()),
        frozenset(state.cold),
        recent.clocks(hosts),
        recent.served(epochs, now_ns),
        {name: len(recent.stored[name, epoch]) for name, epoch in epochs.items()},
        {name: len(found) for name, found in recent.joined.items()},
        tuple(findings(fleet, requests, recent.marks)),
    )


async def _requests(ports: Ports, recent: "RecentLog", now_ns: int) -> RequestTable:
    """The requests of the same time."""
    table = RequestTable()
    log = ports.requests
    bounds = await log.bounds()
    async for piece in log.scan(await log.position_at(now_ns - BEFORE_NS), bounds.last):
        for record in piece.records:
            table.fold(record)
    for decision, position in recent.decisions:
        table.decide(decision, position, recent.block_sizes.get(decision.worker, 1))
    return table


class RecentLog:
    """What the latest messages of a pool's log say."""

    def __init__(self) -> None:
        self.last_ns = 0
        self.marks: list[Mark] = []
        self.decisions: list[tuple[Decision, int]] = []
        self.joined: defaultdict[str, set[int]] = defaultdict(set)
        self.block_sizes: dict[str, int] = {}
        self.stored: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
        self._prefilled: dict[tuple[str, int, str], int] = {}
        self._behind_ns: defaultdict[str, list[int]] = defaultdict(list)

    def take(self, record: Record) -> None:
        """Take one message."""
        batch = record.batch
        self.last_ns = record.stored_ns
        if batch.wall_ns:
            self._behind_ns[batch.writer].append(record.stored_ns - batch.wall_ns)
        for event in batch.events:
            match event:
                case BlocksStored():
                    self.stored[batch.writer, batch.epoch].update(unpack_hashes(event.hashes).tolist())
                case LoadReported():
                    for request in event.prefilled:
                        self._prefilled[batch.writer, batch.epoch, request] = record.stored_ns
                case Decision():
                    self.decisions.append((event, record.position))
                case _:
                    if isinstance(event, WorkerJoined):
                        self.joined[event.worker].add(event.epoch)
                        self.block_sizes[event.worker] = event.block_size
                    mark = mark_of(record, event)
                    if mark is not None:
                        self.marks.append(mark)

    def served(self, epochs: Mapping[str, int], now_ns: int) -> dict[str, Served]:
        """Of each worker's present incarnation the prompts that it computed blocks of, and those whose last block it announced."""
        found = dict.fromkeys(epochs, Served())
        for decision, _ in self.decisions:
            worker, epoch = decision.worker, decision.epoch
            done_ns = self._prefilled.get((worker, epoch, decision.request))
            if epochs.get(worker) != epoch or done_ns is None or done_ns > now_ns - SETTLED_NS:
                continue
            chosen = next((one for one in decision.candidates if one.worker == worker), None)
            if chosen is None or not decision.last or decision.leg == "decode":
                continue
            if chosen.cached_blocks + chosen.lower_blocks >= decision.blocks:
                # All of it was cached: nothing is announced again.
                continue
            known = found[worker]
            found[worker] = Served(
                known.prompts + 1, known.announced + (decision.last in self.stored[worker, epoch])
            )
        return found

    def clocks(self, hosts: Mapping[str, str]) -> tuple[ClockFacts, ...]:
        """The clock of each machine, by its processes that wrote something."""
        by_host: defaultdict[str, list[int]] = defaultdict(list)
        for writer, times in self._behind_ns.items():
            if writer in hosts:
                by_host[hosts[writer]] += times
        return tuple(
            ClockFacts(host, min(times) / 1e9, len(times)) for host, times in sorted(by_host.items())
        )
