"""`headwater capture`: what a fleet's logs have around a moment, in one file."""

import asyncio
import platform
from collections.abc import Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Final, NamedTuple
from urllib.error import URLError
from urllib.request import urlopen

import msgspec

from headwater import __version__
from headwater.actors.runtime.ports import Ports
from headwater.events.memory import MemoryBlobs
from headwater.events.ports import Log, LogError
from headwater.events.snapshot_bytes import UnreadableSnapshot, decode_manifest
from headwater.events.snapshot_store import Bookmarks, SnapshotStore, continues
from headwater.events.table import Table
from headwater.ops.config.sections import NatsSettings
from headwater.ops.config.setting import ConfigError
from headwater.ops.monitoring.files import TARGETS
from headwater.ops.nats.capture_file import (
    FORMAT_VERSION,
    CaptureWriter,
    Contents,
    LogEntry,
    LogWriter,
    Redaction,
    TableValue,
)
from headwater.ops.nats.connect import choose_pool, operator_ports
from headwater.ops.operator.log_reading import find_life
from headwater.ops.terminal import FORMS, Progress, time_ns, utc_time
from headwater.router.state import RouterState
from headwater.schemas.encoding import SCHEMA_VERSION
from headwater.schemas.names import time_of
from headwater.schemas.subjects import bookmark_name, snapshot_name

MINUTE_NS: Final = 60_000_000_000
TRIES: Final = 3

PREFIX_MESSAGES_MAX: Final = 20_000
"""Without a snapshot, a longer log before the captured time is folded into one."""

METRICS_S: Final = 2.0


class Order(NamedTuple):
    """What to capture: `minutes` around a request or a time, half of them before and half after it."""

    around: str
    minutes: float
    output: Path
    with_contents: bool = False
    data_dir: Path | None = None


class Span(NamedTuple):
    """A time from `begin_ns` to `end_ns`."""

    begin_ns: int
    end_ns: int


async def capture(nats: NatsSettings, pool: str, order: Order, *, as_json: bool = False) -> int:
    """Write the file. Raises `ConfigError` if the request or time is not in the log, or the file cannot be written."""
    if order.output.is_dir() or not order.output.parent.is_dir():
        raise ConfigError(f"--output {order.output}: name a file in a folder that exists")
    async with operator_ports(nats, "capture") as ports:
        pool = await choose_pool(ports, pool)
        span = await span_of(ports, order)
        try:
            with CaptureWriter(order.output) as writer:
                contents = await collect(ports, pool, order, span, writer)
                size = writer.close(contents)
        except PermissionError as error:
            raise ConfigError(f"--output {order.output}: {error.strerror}") from error
    if as_json:
        file = {"file": str(order.output), "bytes": size}
        print(msgspec.json.encode(file | msgspec.to_builtins(contents)).decode())
    else:
        print("\n".join(described(order.output, size, contents)))
    return 0


async def span_of(ports: Ports, order: Order) -> Span:
    """The time that is captured. Raises `ConfigError` for a request that the log does not have."""
    now_ns = ports.clock.wall_ns()
    margin_ns = round(order.minutes * MINUTE_NS / 2)
    at_ns = time_ns(order.around, now_ns)
    if at_ns is not None:
        if at_ns > now_ns:
            raise ConfigError(f"--around {order.around}: {utc_time(at_ns)} is in the future")
        return Span(at_ns - margin_ns, min(now_ns, at_ns + margin_ns))
    with Progress(f"looking for {order.around} in the request log") as progress:
        life = await find_life(ports.requests, order.around, now_ns, progress.at)
    if life:
        return Span(life[0].stored_ns - margin_ns, min(now_ns, life[-1].stored_ns + margin_ns))
    made_ns = time_of(order.around, now_ns)
    if made_ns is None:
        raise ConfigError(
            f"--around {order.around}: the request log has no such request, and it is no time: give a request id, {FORMS}"
        )
    return Span(made_ns - margin_ns, min(now_ns, made_ns + margin_ns))


async def collect(ports: Ports, pool: str, order: Order, span: Span, writer: CaptureWriter) -> Contents:
    """Write all but the list of contents, and return that. Raises `ConfigError` if the log has nothing of that time."""
    log = await ports.pool_log(pool)
    notes: list[str] = []
    begin, end = await log.position_at(span.begin_ns), await log.position_at(span.end_ns)
    bounds = await log.bounds()
    if end < bounds.first or begin >= end:
        raise ConfigError(
            f"--around {order.around}: the log of pool {pool} has nothing from {utc_time(span.begin_ns)} to {utc_time(span.end_ns)}"
        )
    snapshot = await _add_snapshot(ports, pool, log, begin, end, writer)
    if snapshot == 0 and bounds.first <= 1 and begin > PREFIX_MESSAGES_MAX:
        snapshot = await _add_fold(log, pool, begin, writer)
        notes.append(
            f"no snapshot is older than the captured time: positions 1 to {snapshot} were folded into one"
        )
    elif snapshot == 0 and bounds.first > 1:
        notes.append(
            f"positions 1 to {bounds.first - 1} are gone and no snapshot continues them: this part of the log cannot be folded"
        )
    elif snapshot > begin:
        notes.append(f"no snapshot is older than the captured time: a fold starts at position {snapshot}")
    after = min(begin, snapshot) if snapshot or bounds.first > 1 else 0
    after = max(after, bounds.first - 1)
    with Progress(f"copying the log of pool {pool}", "messages") as progress:
        pool_log = await _copy(log, after, end, writer.pool_log, progress)
    redaction = None if order.with_contents else Redaction()
    with Progress("copying the request log", "messages") as progress:
        requests = ports.requests
        first = await requests.position_at(span.begin_ns)
        last = await requests.position_at(span.end_ns)
        request_log = await _copy(requests, first, last, writer.request_log, progress, redaction)
    if redaction is not None and redaction.unreadable:
        notes.append(f"{redaction.unreadable} unreadable messages of the request log were left out")
    return Contents(
        version=FORMAT_VERSION,
        release=__version__,
        schema=SCHEMA_VERSION,
        platform=f"{platform.python_implementation()} {platform.python_version()} on {platform.platform()}",
        server=ports.server,
        made_ns=ports.clock.wall_ns(),
        namespace=ports.ns,
        pool=pool,
        around=order.around,
        begin_ns=span.begin_ns,
        end_ns=span.end_ns,
        snapshot=snapshot,
        has_contents=order.with_contents,
        pool_log=pool_log,
        request_log=request_log,
        blobs=writer.blobs,
        leases=await _values(ports.leases),
        cards=await _values(ports.cards),
        metrics=await _add_metrics(order.data_dir, writer),
        notes=tuple(notes),
    )


async def _copy(
    log: Log,
    after: int,
    until: int,
    writer: LogWriter,
    progress: Progress,
    redaction: Redaction | None = None,
) -> LogEntry:
    """Copy a part of a log as it is stored, or without contents."""
    async with aclosing(log.scan_raw(after, until)) as runs:  # type: ignore[type-var]
        async for run in runs:
            if redaction is not None:
                bare = [redaction.without_contents(message) for message in run]
                run = [message for message in bare if message is not None]
            writer.add(run)
            if run:
                progress.at(run[-1].position - after, until - after)
    return writer.entry(await log.identity(), after)


async def _add_snapshot(
    ports: Ports, pool: str, log: Log, begin: int, end: int, writer: CaptureWriter
) -> int:
    """Add the newest snapshot at or before a position, or else, where the log's start is gone, the oldest after it, and all bookmarks.

    Returns its position, 0 for none.
    """
    store = SnapshotStore(ports.blobs, pool)
    for name in await Bookmarks(ports.blobs, pool).all():
        data = await ports.blobs.get(bookmark_name(pool, name))
        if data is not None:
            writer.add_blob(bookmark_name(pool, name), data)
    tried: set[int] = set()
    for _ in range(TRIES):
        bounds = await log.bounds()
        usable = [
            position
            for position in await store.positions()
            if continues(position, bounds) and position not in tried
        ]
        older = [position for position in usable if position <= begin]
        later = [position for position in usable if begin < position <= end] if bounds.first > 1 else []
        chosen = max(older) if older else min(later, default=0)
        if not chosen:
            return 0
        try:
            await _copy_snapshot(ports, pool, chosen, writer)
        except (UnreadableSnapshot, LogError):
            # A router has pruned it meanwhile, or it is damaged.
            tried.add(chosen)
            continue
        return chosen
    return 0


async def _add_fold(log: Log, pool: str, begin: int, writer: CaptureWriter) -> int:
    """Fold the log from its start to a position, and add the state as a snapshot; returns its position."""
    state = RouterState()
    state.log = await log.identity()
    with Progress(f"folding the log of pool {pool} up to the captured time", "messages") as progress:
        async with aclosing(log.scan(0, begin)) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                state.fold(piece)
                progress.at(state.position, begin)
    await SnapshotStore(WrittenBlobs(writer), pool).save(state.snapshot())
    return state.position


class WrittenBlobs(MemoryBlobs):
    """The objects of a capture that is being written."""

    def __init__(self, writer: CaptureWriter) -> None:
        super().__init__()
        self._writer = writer

    async def put(self, name: str, data: bytes | memoryview) -> str:
        """See `Blobs.put`."""
        return self._writer.add_blob(name, data)


async def _copy_snapshot(ports: Ports, pool: str, position: int, writer: CaptureWriter) -> None:
    name = snapshot_name(pool, position)
    data = await ports.blobs.get(name)
    if data is None:
        raise UnreadableSnapshot(f"there is no snapshot at position {position}")
    for chunk in decode_manifest(data).chunks:
        room = bytearray(chunk.size)
        if not await ports.blobs.read_into(chunk.name, memoryview(room), chunk.digest):
            raise UnreadableSnapshot(f"its chunk {chunk.name} is missing")
        writer.add_blob(chunk.name, room)
    # Last, as in the store: what has a manifest is whole.
    writer.add_blob(name, data)


async def _values(table: Table) -> tuple[TableValue, ...]:
    """What a table has now."""
    async with aclosing(table.watch()) as watch:  # type: ignore[type-var]
        async for entries in watch:
            return tuple([TableValue(entry.key, entry.value) for entry in entries if entry.value is not None])
    return ()


async def _add_metrics(folder: Path | None, writer: CaptureWriter) -> dict[str, str]:
    """Add the metrics of the processes that `headwater up` lists in its folder; returns the members by process.

    A process that does not answer is left out.
    """
    members: dict[str, str] = {}
    if folder is None:
        return members
    try:
        groups = msgspec.json.decode((folder / TARGETS).read_bytes(), type=list[_Targets])
    except (OSError, msgspec.DecodeError):
        return members
    for group in groups:
        for target in group.targets:
            name = group.labels.get("name", target)
            text = await asyncio.to_thread(_fetched, f"http://{target}/metrics")
            if text is not None:
                member = f"metrics/{len(members):06}.txt"
                writer.add(member, text)
                members[f"{name} ({target})"] = member
    return members


class _Targets(msgspec.Struct):
    targets: list[str]
    labels: Mapping[str, str] = {}


def _fetched(url: str) -> bytes | None:
    try:
        with urlopen(url, timeout=METRICS_S) as answer:
            data: bytes = answer.read()
            return data
    except (URLError, OSError, ValueError):
        return None


def described(path: Path, size: int, contents: Contents) -> list[str]:
    """What a file has, for people."""
    pool_log, request_log = contents.pool_log, contents.request_log
    start = f"the snapshot at position {contents.snapshot}" if contents.snapshot else "no snapshot"
    lines = [
        f"{path}: {size:,} bytes, {utc_time(contents.begin_ns)} to {utc_time(contents.end_ns)}",
        f"pool {contents.pool}: {_part(pool_log)}, with {start}",
        f"request log: {_part(request_log)}, {'with' if contents.has_contents else 'without'} contents of prompts and answers",
        f"{len(contents.leases)} leases and {len(contents.cards)} model cards as they are now; metrics of {len(contents.metrics)} processes",
    ]
    return lines + list(contents.notes)


def _part(entry: LogEntry) -> str:
    if not entry.chunks:
        return "no messages"
    return f"positions {entry.chunks[0].first} to {entry.last}, {entry.messages:,} messages"
