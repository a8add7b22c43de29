"""`headwater bisect --when CONDITION`: the first position of a pool's log where a condition on the folded state begins to hold.

A condition need not be monotone, so the log is folded forward, and the condition tested wherever one of its facts has changed. Only the
kinds of events, and where the condition is about named workers the writers, that these facts follow from are read.
"""

import asyncio
import sys
from typing import Any, Final, NamedTuple

import msgspec

from headwater.actors.runtime.ports import Ports
from headwater.events.ports import Record, Unreadable
from headwater.ops.config.sections import NatsSettings
from headwater.ops.config.setting import ConfigError
from headwater.ops.debug.places import earliest, find_position, nearest_state, open_log, scan_each
from headwater.ops.debug.predicate import Predicate, Totals, Value
from headwater.ops.debug.tail import data_of, tag_of, text_of
from headwater.ops.nats.connect import choose_pool, operator_ports
from headwater.ops.terminal import Progress, iso_time, table
from headwater.router.state import RouterState, apply_to_loads
from headwater.router.worker import NoCredit
from headwater.schemas.events import LoadReported
from headwater.schemas.names import InvalidName
from headwater.schemas.subjects import ANY, POOL_KINDS, PoolKind, pool_kind, pool_subject

PAUSE_POSITIONS: Final = 256
"""After so many positions other tasks may run."""

NO_MEASUREMENTS: Final = dict.fromkeys(("cached", "prefills", "outputs", "encodes", "reads", "answered"), ())
"""Fields of load reports from which only estimates are learned, without a value."""

EVENTS_MAX: Final = 5
"""Events of the message found that are shown."""


class Found(NamedTuple):
    """Where a condition begins to hold, by which message, and the values of its facts before and there."""

    position: int
    message: Record | Unreadable
    before: tuple[Value, ...]
    after: tuple[Value, ...]


class Searched(NamedTuple):
    """What a search between two positions came to.

    `held`: the condition held at the start already; `ceased` is then where it no longer did, None if it always held.
    `values` are the last ones of the facts, `workers` all that were in the pool.
    """

    start: int
    end: int
    found: Found | None
    held: bool
    ceased: int | None
    values: tuple[Value, ...]
    workers: frozenset[str]

    @property
    def holds(self) -> bool:
        """Is there a position where it holds?"""
        return self.held or self.found is not None


class PartialFold:
    """Folds what a condition depends on, and has the values of its facts."""

    def __init__(self, state: RouterState, predicate: Predicate) -> None:
        self.state = state
        state.loads.credit = NoCredit()
        self.seen = set(state.loads.workers)
        self._predicate = predicate
        self._routed = "route" in predicate.kinds
        self._only = predicate.workers
        self._routes = predicate.workers_of("route")
        self._totals = Totals(state, predicate.sums, predicate.extremes)
        self._reads = [term.read for term in predicate.terms]

    def values(self) -> tuple[Value, ...]:
        """The present values of the facts."""
        return tuple([read(self.state, self._totals) for read in self._reads])

    def skip(self, message: Unreadable) -> None:
        """A message that cannot be read."""
        self.state.skip(message)

    def apply(self, record: Record) -> None:
        """Fold a message as far as the facts depend on it."""
        kind = pool_kind(record.subject)
        if kind == "route":
            self._route(record)
        elif kind == "load":
            self._report(record)
        elif kind == "kv":
            # These change the index alone.
            for event in self.state.admit(record)[0]:
                self.state.apply_to_index(record.batch, event)
        else:
            self.state.apply(record)
        if self._only is None:
            self._totals.touch(record.batch.writer)
            for event in record.batch.events:
                name = getattr(event, "worker", "")
                if name:
                    self._totals.touch(name)

    def _route(self, record: Record) -> None:
        """Decisions, without those for workers that nobody asks for: no report of theirs is read, so they would add up."""
        fold, _ = self.state.chains.follow(record)
        self.state.position = record.position
        for event in record.batch.events if fold else ():
            if self._routes is None or getattr(event, "worker", "") in self._routes:
                apply_to_loads(self.state.loads, record, event)

    def _report(self, record: Record) -> None:
        """Load reports, without the measurements that only estimates are learned from, and where nobody asks for requests without these."""
        batch, loads = record.batch, self.state.loads
        routed = self._routed and (self._routes is None or batch.writer in self._routes)
        for event in self.state.admit(record)[0]:
            worker = loads.current(batch.writer, batch.epoch)
            if worker is None:
                continue
            if not isinstance(event, LoadReported):
                if routed:
                    apply_to_loads(loads, record, event)
            elif routed:
                bare = msgspec.structs.replace(event, **NO_MEASUREMENTS)
                loads.report(batch.writer, batch.epoch, bare)
            else:
                worker.running, worker.waiting = event.running, event.waiting
                worker.used_blocks, worker.total_blocks = event.used_blocks, event.total_blocks


async def bisect(
    nats: NatsSettings, pool: str, predicate: Predicate, start: str, end: str, *, as_json: bool
) -> int:
    """Print where the condition first begins to hold. 1 if it nowhere holds."""
    async with operator_ports(nats, "bisect") as ports:
        return await show(ports, await choose_pool(ports, pool), predicate, start, end, as_json=as_json)


async def show(
    ports: Ports, pool: str, predicate: Predicate, start: str = "", end: str = "end", *, as_json: bool = False
) -> int:
    """See `bisect`."""
    searched = await search(ports, pool, predicate, start, end)
    if as_json:
        print(msgspec.json.encode(as_data(pool, predicate, searched)).decode())
    else:
        print(as_text(pool, predicate, searched))
    sys.stdout.flush()
    return 0 if searched.holds else 1


async def search(ports: Ports, pool: str, predicate: Predicate, start: str, end: str) -> Searched:
    """Fold from a place to another until the condition begins to hold. Raises `ConfigError`."""
    log = await open_log(ports, pool)
    first = await find_position(start, log, "--from") if start else await earliest(log)
    last = await find_position(end, log, "--to")
    if first > last:
        raise ConfigError(f"--from is position {first} and --to is {last}, which is before it: exchange them")
    subjects = subjects_of(ports.ns, pool, predicate)
    fold = PartialFold(await nearest_state(log, first), predicate)
    async for run in scan_each(log.log, fold.state.position, first, subjects):
        for message in run:
            _fold(fold, message)
    result = Searched(first, last, None, predicate.holds(fold.values()), None, fold.values(), frozenset())
    pause_at = first
    with Progress("folding the log") as progress:
        async for run in scan_each(log.log, first, last, subjects):
            for message in run:
                _fold(fold, message)
                result = _tested(result, predicate, message, fold.values())
                if result.found is not None:
                    return result._replace(workers=frozenset({*fold.seen, *fold.state.loads.workers}))
            if run[-1].position >= pause_at:
                pause_at = run[-1].position + PAUSE_POSITIONS
                fold.seen.update(fold.state.loads.workers)
                progress.at(run[-1].position - first, last - first)
                await asyncio.sleep(0)
    return result._replace(workers=frozenset({*fold.seen, *fold.state.loads.workers}))


def _tested(
    result: Searched, predicate: Predicate, message: Record | Unreadable, values: tuple[Value, ...]
) -> Searched:
    """The result after a message, at which the facts have these values."""
    before = result.values
    if values == before:
        return result
    result = result._replace(values=values)
    if not predicate.holds(values):
        return result._replace(ceased=message.position) if result.held and result.ceased is None else result
    if result.held and result.ceased is None:
        return result
    return result._replace(found=Found(message.position, message, before, values))


def _fold(fold: PartialFold, message: Record | Unreadable) -> None:
    if isinstance(message, Unreadable):
        fold.skip(message)
    else:
        fold.apply(message)


def subjects_of(ns: str, pool: str, predicate: Predicate) -> tuple[str, ...]:
    """The subjects of the pool's log that the condition depends on."""
    patterns = []
    for kind in POOL_KINDS:
        if kind not in predicate.kinds:
            continue
        only = predicate.workers_of(kind)
        if kind in ("kv", "load") and only is not None:
            patterns += [_subject_of(ns, pool, kind, worker) for worker in sorted(only)]
        else:
            patterns.append(pool_subject(ns, pool, kind, ANY))
    return tuple(patterns)


def _subject_of(ns: str, pool: str, kind: PoolKind, worker: str) -> str:
    try:
        return pool_subject(ns, pool, kind, worker)
    except InvalidName as error:
        raise ConfigError(f"--when: {error}") from error


def as_data(pool: str, predicate: Predicate, searched: Searched) -> dict[str, Any]:
    """The result for programs."""
    data: dict[str, Any] = {
        "pool": pool,
        "when": predicate.text,
        "from": searched.start,
        "to": searched.end,
        "held_at_start": searched.held,
        "ceased": searched.ceased,
        "position": None,
        "values": _named(predicate, searched.values),
    }
    change = searched.found
    if change is not None:
        data |= {"position": change.position, "before": _named(predicate, change.before)}
        if isinstance(change.message, Record):
            batch = change.message.batch
            events = [{"event": tag_of(event), "fields": data_of(event)} for event in batch.events]
            data |= {
                "time": iso_time(change.message.stored_ns),
                "message": {"writer": batch.writer, "epoch": batch.epoch, "events": events},
            }
    return data


def _named(predicate: Predicate, values: tuple[Value, ...]) -> dict[str, Value]:
    return {term.text: value for term, value in zip(predicate.terms, values, strict=True)}


def as_text(pool: str, predicate: Predicate, searched: Searched) -> str:
    """The result for people."""
    lines = []
    if searched.held:
        until = "to the end" if searched.ceased is None else f"until position {searched.ceased}"
        lines.append(f"pool {pool}: it holds where the search begins, at position {searched.start}, {until}")
    change = searched.found
    if change is None:
        again = " again" if searched.held else ""
        if not searched.held or searched.ceased is not None:
            between = f"from position {searched.start} to {searched.end}"
            lines.append(f"pool {pool}: it does not begin to hold{again} {between}: {predicate.text}")
        for name in sorted((predicate.workers or frozenset()) - searched.workers):
            names = ", ".join(sorted(searched.workers)) or "none"
            lines.append(f"worker {name} was not in the pool; there were: {names}")
        rows = [(term, _shown(value)) for term, value in _named(predicate, searched.values).items()]
        return "\n".join([*lines, table(("fact", "at the end"), rows)])
    message = change.message
    time = f", {iso_time(message.stored_ns)}" if isinstance(message, Record) else ""
    lines.append(f"pool {pool}, position {change.position}{time}: {predicate.text}")
    before, after = _named(predicate, change.before), _named(predicate, change.after)
    rows3 = [(term, _shown(before[term]), _shown(value)) for term, value in after.items()]
    return "\n".join([*lines, table(("fact", "before", "there"), rows3), *_message(message)])


def _message(message: Record | Unreadable) -> list[str]:
    """Lines about the message from which on a condition holds."""
    if isinstance(message, Unreadable):
        return [f"by an unreadable message of {message.subject}: {message.reason}"]
    batch = message.batch
    events = [f"  {tag_of(event)}  {text_of(event)}" for event in batch.events[:EVENTS_MAX]]
    more = [f"  and {len(batch.events) - EVENTS_MAX} more events"] if len(batch.events) > EVENTS_MAX else []
    return [f"by a message of {batch.writer}, epoch {batch.epoch}:", *events, *more]


def _shown(value: Value) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return " ".join(value) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
