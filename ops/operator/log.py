"""Looking at the log: `headwater log` counts it, `headwater explain REQUEST` says why a request went where."""

from collections import Counter
from datetime import UTC, datetime
from typing import Any

import msgspec

from headwater.actors.runtime.ports import Ports
from headwater.events.log import Log, Record
from headwater.ops.config.nats import NatsSettings
from headwater.ops.nats.connect import operator_ports
from headwater.ops.nats.pool_choice import choose_pool
from headwater.ops.process.text_table import table
from headwater.schemas.events.fleet import EnginesWeighted, WorkerControlled
from headwater.schemas.events.request import RequestRouted, RequestStepped
from headwater.schemas.subjects import pool_kind


async def show_log(
    nats: NatsSettings, pool: str, *, audit: bool = False, requests: bool = False, as_json: bool = False
) -> int:
    """Print a pool log's events by kind, and its position; with `audit` who had workers do what.

    With `requests` the request log's.
    """
    async with operator_ports(nats, "log") as ports:
        if requests:
            print(await request_summary(ports))
            return 0
        if audit:
            found = await audited(await ports.pool_log(await choose_pool(ports, pool)))
            print("\n".join(msgspec.json.encode(one).decode() for one in found) if as_json else _audit(found))
            return 0
        print(await summary(ports, await choose_pool(ports, pool)))
    return 0


async def request_summary(ports: Ports) -> str:
    """Events of the request log by type; what went back in its saga by where and why."""
    events: Counter[str] = Counter()
    async for piece in ports.requests.read(0, follow=False):
        for record in piece.records:
            for event in record.batch.events:
                name = type(event).__name__
                if isinstance(event, RequestStepped):
                    name += f" ({event.before}: {event.cause})"
                elif isinstance(event, RequestRouted) and event.leg:
                    name += f" ({event.leg})"
                events[name] += 1
    rows = sorted(events.items())
    return f"request log: {sum(events.values())} events\n{table(('event', 'count'), rows)}"


async def audited(log: Log) -> list[dict[str, Any]]:
    """Every command in the log, oldest first: when, where, what, by whom and what came of it."""
    found: list[dict[str, Any]] = []
    async for piece in log.read(0, follow=False):
        for record in piece.records:
            when = datetime.fromtimestamp(record.batch.wall_ns / 1e9, UTC).isoformat(timespec="milliseconds")
            for event in record.batch.events:
                if isinstance(event, WorkerControlled):
                    arguments = msgspec.json.decode(event.arguments)
                    facts = {**msgspec.structs.asdict(event), "arguments": arguments}
                    found.append({"position": record.position, "time": when, **facts})
                elif isinstance(event, EnginesWeighted):
                    found.append({"position": record.position, "time": when, **_weighted(record, event)})
    return found


def _weighted(record: Record, event: EnginesWeighted) -> dict[str, Any]:
    """Engine weights, as a command to the router that wrote them."""
    return {
        "worker": record.batch.writer,
        "epoch": record.batch.epoch,
        "command": "weights",
        "arguments": event.weights,
        "by": event.by,
        "status": 200,
        "detail": "engine weights set" if event.weights else "engine weights removed",
    }


def _audit(found: list[dict[str, Any]]) -> str:
    columns = ("time", "worker", "epoch", "command", "arguments", "by", "status", "detail")
    rows = [
        [msgspec.json.encode(one[key]).decode() if key == "arguments" else one[key] for key in columns]
        for one in found
    ]
    return f"{len(found)} control commands\n{table(columns, rows)}"


async def summary(ports: Ports, pool: str) -> str:
    """Events of a pool's log by kind and type, with what they take."""
    log = await ports.pool_log(pool)
    events: Counter[tuple[str, str]] = Counter()
    writers: dict[tuple[str, str], set[str]] = {}
    messages = 0
    position = 0
    async for piece in log.read(0, follow=False):
        for record in piece.records:
            messages += 1
            position = record.position
            for event in record.batch.events:
                key = (pool_kind(record.subject), type(event).__name__)
                events[key] += 1
                writers.setdefault(key, set()).add(record.batch.writer)
    rows = [
        (kind, name, count, ", ".join(sorted(writers[kind, name])))
        for (kind, name), count in sorted(events.items())
    ]
    head = f"log of pool {pool}: {sum(events.values())} events in {messages} messages, position {position}"
    return f"{head}\n{table(('kind', 'event', 'count', 'written by'), rows)}"
