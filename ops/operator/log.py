"""`headwater log`, `tree`, `snapshots` and `replay`: the content of a pool's log, counted, shown and folded again."""

import time
from collections import Counter
from datetime import UTC, datetime
from typing import Any

import msgspec

from headwater.actors.runtime.ports import Ports
from headwater.events.ports import Log, Record
from headwater.events.snapshot_store import Kept, SnapshotStore
from headwater.ops.config.sections import NatsSettings
from headwater.ops.config.setting import ConfigError
from headwater.ops.nats.connect import choose_pool, operator_ports
from headwater.ops.operator.log_reading import folded
from headwater.ops.terminal import table
from headwater.router.index.tree import text, tree
from headwater.schemas.events import (
    EnginesWeighted,
    RequestRouted,
    RequestStepped,
    TrafficSplit,
    WorkerControlled,
)
from headwater.schemas.names import InvalidName
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
            commands = await audited(await ports.pool_log(await choose_pool(ports, pool)))
            print(
                "\n".join(msgspec.json.encode(command).decode() for command in commands)
                if as_json
                else _audit(commands)
            )
            return 0
        print(await summary(ports, await choose_pool(ports, pool)))
    return 0


async def request_summary(ports: Ports) -> str:
    """Events of the request log by type; what went back in its saga by where and why."""
    events: Counter[str] = Counter()
    async for piece in ports.requests.read(0, follow=False):
        for _, event in piece.events():
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
    commands: list[dict[str, Any]] = []
    async for piece in log.read(0, follow=False):
        for record in piece.records:
            when = datetime.fromtimestamp(record.batch.wall_ns / 1e9, UTC).isoformat(timespec="milliseconds")
            for event in record.batch.events:
                if isinstance(event, WorkerControlled | EnginesWeighted | TrafficSplit):
                    commands.append({"position": record.position, "time": when, **_as_command(record, event)})
    return commands


def _as_command(record: Record, event: WorkerControlled | EnginesWeighted | TrafficSplit) -> dict[str, Any]:
    """A command to a worker; engine weights and a traffic split as one to the router that wrote them."""
    match event:
        case WorkerControlled():
            return {**msgspec.structs.asdict(event), "arguments": msgspec.json.decode(event.arguments)}
        case EnginesWeighted(weights=arguments):
            command, detail = "weights", "engine weights set" if arguments else "engine weights removed"
        case TrafficSplit(shares=arguments):
            command = f"split by {event.subject}"
            detail = event.reason or ("traffic split set" if arguments else "traffic split removed")
    return {
        "worker": record.batch.writer,
        "epoch": record.batch.epoch,
        "command": command,
        "arguments": arguments,
        "by": event.by,
        "status": 200,
        "detail": detail,
    }


def _audit(commands: list[dict[str, Any]]) -> str:
    columns = ("time", "worker", "epoch", "command", "arguments", "by", "status", "detail")
    rows = [
        [
            msgspec.json.encode(command[key]).decode() if key == "arguments" else command[key]
            for key in columns
        ]
        for command in commands
    ]
    return f"{len(commands)} control commands\n{table(columns, rows)}"


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


# `headwater tree`: the blocks that a pool's workers hold, from the newest snapshot and the log after it.


async def show_tree(
    nats: NatsSettings, pool: str, *, worker: str, depth: int, limit: int, as_json: bool
) -> int:
    """Print it. Raises `ConfigError` for a worker that the pool does not have."""
    async with operator_ports(nats, "tree") as ports:
        pool = await choose_pool(ports, pool)
        state = await folded(await ports.pool_log(pool), SnapshotStore(ports.blobs, pool))
    try:
        prefix_tree = tree(state.index, worker=worker, depth=depth, limit=limit)
    except LookupError as error:
        raise ConfigError(f"--worker: {error.args[0]}") from error
    if as_json:
        print(msgspec.json.encode({"pool": pool, "position": state.position, "tree": prefix_tree}).decode())
    else:
        print(f"pool {pool} at position {state.position}: {text(prefix_tree)}")
        if state.cold:
            print(f"ignored until they report their blocks again: {', '.join(sorted(state.cold))}")
    return 0


# `headwater snapshots`: a pool's snapshots, and bookmarks that keep them indefinitely.


async def snapshots(
    nats: NatsSettings,
    pool: str,
    *,
    bookmark: str = "",
    position: int | None = None,
    drop: str = "",
    as_json: bool = False,
) -> int:
    """List, or name one (the newest, where no position is given), or drop a name. Raises `ConfigError`."""
    async with operator_ports(nats, "snapshots") as ports:
        pool = await choose_pool(ports, pool)
        store = SnapshotStore(ports.blobs, pool)
        try:
            if bookmark:
                named = await name(store, bookmark, position)
                print(f"bookmark {bookmark}: the snapshot of pool {pool} at position {named} is kept")
                return 0
            if drop:
                if not await store.bookmarks.drop(drop):
                    raise ConfigError(f"--drop {drop}: {await _known(store)}")
                print(f"bookmark {drop} is dropped; its snapshot goes when a newer one is saved")
                return 0
        except InvalidName as error:
            raise ConfigError(str(error)) from error
        stored_snapshots, bookmarks = await store.listing(), await store.bookmarks.all()
        if as_json:
            print(msgspec.json.encode(as_data(pool, stored_snapshots, bookmarks)).decode())
        else:
            print(listing(pool, stored_snapshots, bookmarks, time.time_ns()))
        return 0


async def name(store: SnapshotStore, bookmark: str, position: int | None = None) -> int:
    """Name a snapshot and return its position. Raises `ConfigError` if there is none or it is unreadable."""
    positions = await store.positions()
    if not positions:
        raise ConfigError("there is no snapshot yet; a router saves one within a minute, and when it stops")
    target = positions[-1] if position is None else position
    if target not in positions:
        raise ConfigError(f"--position {target}: there are snapshots at {', '.join(map(str, positions))}")
    problem = next(
        (snapshot.problem for snapshot in await store.listing() if snapshot.position == target), ""
    )
    if problem:
        raise ConfigError(f"--position {target}: the snapshot is unreadable: {problem}")
    before = (await store.bookmarks.all()).get(bookmark)
    await store.bookmarks.put(bookmark, target)
    if target not in await store.positions():
        # A router dropped it while it was being named.
        if before is None:
            await store.bookmarks.drop(bookmark)
        else:
            await store.bookmarks.put(bookmark, before)
        raise ConfigError(f"--position {target}: a newer snapshot has just taken its place; name that one")
    return target


async def _known(store: SnapshotStore) -> str:
    names = ", ".join(sorted(await store.bookmarks.all()))
    return f"no such bookmark; there are {names}" if names else "no such bookmark; there are none"


def as_data(pool: str, stored_snapshots: list[Kept], bookmarks: dict[str, int]) -> dict[str, Any]:
    """Snapshots for programs, newest last; sizes in bytes, times in ns since 1970. An unreadable one has a `problem`."""
    return {
        "pool": pool,
        "snapshots": [
            {"position": snapshot.position, "bytes": snapshot.size}
            | (
                {"problem": snapshot.problem}
                if snapshot.manifest is None
                else {
                    "made_ns": snapshot.manifest.made_ns,
                    "blocks": snapshot.manifest.facts.get("rows"),
                    "digest": snapshot.manifest.digest,
                }
            )
            for snapshot in stored_snapshots
        ],
        "bookmarks": bookmarks,
    }


def listing(pool: str, stored_snapshots: list[Kept], bookmarks: dict[str, int], now_ns: int) -> str:
    """Snapshots as a table, newest last."""
    rows = []
    for snapshot in stored_snapshots:
        names = " ".join(
            sorted(name for name, position in bookmarks.items() if position == snapshot.position)
        )
        if snapshot.manifest is None:
            rows.append((snapshot.position, "", "", "", f"unreadable: {snapshot.problem}", names))
            continue
        made_ns = snapshot.manifest.made_ns
        blocks = snapshot.manifest.facts.get("rows", "")
        age = _age((now_ns - made_ns) / 1e9) if made_ns else "unknown"
        rows.append(
            (snapshot.position, age, f"{snapshot.size:,}", f"{blocks:,}", snapshot.manifest.digest, names)
        )
    head = f"pool {pool}: {len(stored_snapshots)} snapshots"
    missing = sorted(
        name
        for name, at in bookmarks.items()
        if at not in {snapshot.position for snapshot in stored_snapshots}
    )
    lost = f"\nbookmarks without their snapshot: {', '.join(missing)}" if missing else ""
    columns = ("position", "age", "bytes", "blocks", "digest", "bookmarks")
    return (f"{head}\n{table(columns, rows)}" if rows else head) + lost


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
