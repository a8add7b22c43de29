"""`headwater diff A B`: what differs between the folded states at two positions, and the events between them."""

import asyncio
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from headwater.actors.runtime.ports import Ports
from headwater.events.ports import Unreadable
from headwater.ops.config.sections import NatsSettings
from headwater.ops.config.setting import ConfigError
from headwater.ops.debug.places import find_position, open_log, state_at, stored_at
from headwater.ops.debug.predicate import WORKER, Value
from headwater.ops.debug.tail import tag_of
from headwater.ops.nats.connect import choose_pool, operator_ports
from headwater.ops.terminal import Progress, iso_time, table
from headwater.router.state import RouterState, in_order
from headwater.router.worker import Worker
from headwater.schemas.subjects import pool_kind

UNREADABLE: Final = "unreadable"


COMPARED: Final = (
    *("epoch", "state", "role", "engine", "adapters", "taints", "running", "waiting", "used_blocks"),
    *("total_blocks", "requests", "queued_tokens", "held_blocks", "cached_blocks", "cache_known", "step_ms"),
)
"""What is compared of a worker: facts that conditions can name, too. Load is as it last reported."""

WorkerFacts = dict[str, Value]


class StateFacts(msgspec.Struct, frozen=True):
    """What is compared of a state."""

    position: int
    workers: dict[str, WorkerFacts]
    engine_weights: dict[str, float]
    splits: dict[str, dict[str, float]]
    blocks: int


class Change(NamedTuple):
    """A fact that differs; of the whole pool where `worker` is empty."""

    worker: str
    fact: str
    before: Any
    after: Any


class Difference(NamedTuple):
    """Two states, what differs between them, and the number of events between them by kind and name."""

    before: StateFacts
    after: StateFacts
    changes: list[Change]
    events: Counter[tuple[str, str]]


def facts_of(state: RouterState) -> StateFacts:
    """What is compared of a state: a copy."""

    def read(worker: Worker, fact: str) -> Value:
        if fact == "cache_known":
            return worker.name not in state.cold
        return round(worker.step_ms, 3) if fact == "step_ms" else WORKER[fact].read(state, worker)

    workers = {
        name: {fact: read(worker, fact) for fact in COMPARED}
        for name, worker in sorted(state.loads.workers.items())
    }
    splits = {name: dict(split.event.shares) for name, split in sorted(state.loads.splits.items())}
    return StateFacts(state.position, workers, dict(state.loads.engine_weights), splits, state.index.rows)


def changes(before: StateFacts, after: StateFacts) -> Iterator[Change]:
    """What differs, the pool first, then worker by worker."""
    if before.engine_weights != after.engine_weights:
        yield Change("", "engine weights", before.engine_weights, after.engine_weights)
    if before.splits != after.splits:
        yield Change("", "traffic splits", before.splits, after.splits)
    if before.blocks != after.blocks:
        yield Change("", "distinct blocks", before.blocks, after.blocks)
    for name in sorted(before.workers.keys() | after.workers.keys()):
        old, new = before.workers.get(name), after.workers.get(name)
        if old is None or new is None:
            yield Change(name, "present", old is not None, new is not None)
            continue
        for fact in COMPARED:
            if old[fact] != new[fact]:
                yield Change(name, fact.replace("_", " "), old[fact], new[fact])


async def compare(ports: Ports, pool: str, first: str, second: str) -> Difference:
    """Fold up to one place, and on to the other. Raises `ConfigError`."""
    log = await open_log(ports, pool)
    start, end = await find_position(first, log, "A"), await find_position(second, log, "B")
    if start > end:
        raise ConfigError(f"A is position {start} and B is {end}, which is before it: exchange them")
    state = await state_at(log, start)
    before = facts_of(state)
    events: Counter[tuple[str, str]] = Counter()
    with Progress("folding the log") as progress:
        async for piece in log.log.scan(start, end):
            for message in in_order(piece):
                kind = pool_kind(message.subject)
                if isinstance(message, Unreadable):
                    events[kind, UNREADABLE] += 1
                    state.skip(message)
                    continue
                events.update([(kind, tag_of(event)) for event in message.batch.events])
                state.apply(message)
            progress.at(state.position - start, end - start)
            await asyncio.sleep(0)
    after = facts_of(state)
    return Difference(before, after, list(changes(before, after)), events)


async def diff(nats: NatsSettings, pool: str, first: str, second: str, *, as_json: bool) -> int:
    """Print what differs."""
    async with operator_ports(nats, "diff") as ports:
        return await show(ports, await choose_pool(ports, pool), first, second, as_json=as_json)


async def show(ports: Ports, pool: str, first: str, second: str, *, as_json: bool = False) -> int:
    """See `diff`."""
    difference = await compare(ports, pool, first, second)
    if as_json:
        print(msgspec.json.encode(as_data(pool, difference)).decode())
    else:
        log = await ports.pool_log(pool)
        times = [await stored_at(log, state.position) for state in (difference.before, difference.after)]
        print(as_text(pool, difference, times))
    sys.stdout.flush()
    return 0


def as_data(pool: str, difference: Difference) -> dict[str, Any]:
    """The difference for programs, with both states."""
    return {
        "pool": pool,
        "before": difference.before,
        "after": difference.after,
        "changes": [change._asdict() for change in difference.changes],
        "events": {name: count for (_, name), count in sorted(difference.events.items())},
    }


def as_text(pool: str, difference: Difference, times: list[int]) -> str:
    """The difference for people."""
    shown = [
        f"{entry.position}{f' ({iso_time(time)})' if time else ''}"
        for entry, time in zip((difference.before, difference.after), times, strict=True)
    ]
    lines = [f"pool {pool}, from position {shown[0]} to {shown[1]}"]
    joined = [entry for entry in difference.changes if entry.fact == "present"]
    for change in joined:
        facts = (difference.after if change.after else difference.before).workers[change.worker]
        lines.append(f"{change.worker} {'joined' if change.after else 'left'}: {_standing(facts)}")
    rows = [
        (entry.worker or "(pool)", entry.fact, _shown(entry.before), _shown(entry.after))
        for entry in difference.changes
        if entry not in joined
    ]
    if rows:
        lines.append(table(("worker", "what", "before", "after"), rows))
    if not difference.changes:
        lines.append("nothing that is compared differs")
    counts = [(kind, name, count) for (kind, name), count in sorted(difference.events.items())]
    lines.append(table(("kind", "event", "count"), counts) if counts else "no events between them")
    return "\n".join(lines)


def _standing(facts: WorkerFacts) -> str:
    return (
        f"epoch {facts['epoch']}, {facts['state']}, {facts['role']} on {facts['engine']}, running {facts['running']}, "
        f"waiting {facts['waiting']}, {facts['requests']} requests, {facts['cached_blocks']} blocks cached"
    )


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return " ".join(f"{name}={weight:g}" for name, weight in sorted(value.items())) or "none"
    if isinstance(value, tuple):
        return " ".join(value) or "none"
    return f"{value:,}" if isinstance(value, int | float) else str(value)
