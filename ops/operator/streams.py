"""`headwater streams`: every stream of a namespace, how full it is, and whether it is as it should be."""

import asyncio
from typing import Any

import msgspec

from headwater.actors.runtime.tables import CardTable
from headwater.events.jetstream import Connection, JetStreamTable
from headwater.events.jetstream.copies import site_of
from headwater.events.jetstream.stream_spec import StreamDifference, StreamSpec
from headwater.events.jetstream.streams import (
    MISSING,
    RepairResult,
    StreamStatus,
    ensure_namespace,
    ensure_pool,
    probe,
    stream_names,
    survey,
    wanted_streams,
)
from headwater.events.jetstream.streams import repair as repair_stream
from headwater.ops.config.processes import PoolOperator
from headwater.ops.config.sections import NatsSettings, StreamSettings
from headwater.ops.config.setting import ConfigError
from headwater.ops.nats.config import reader_kind
from headwater.ops.nats.connect import connected
from headwater.ops.nats.server import while_it_starts
from headwater.ops.operator.mirrors import repair_mirrors
from headwater.ops.start.actor import keep_namespace, keep_pools
from headwater.ops.start.metrics import ProbeBoard
from headwater.ops.start.metrics import serve as serve_metrics
from headwater.ops.terminal import table
from headwater.schemas import subjects
from headwater.schemas.clock import SystemClock

COLUMNS = (
    "stream",
    "what",
    "messages",
    "size",
    "oldest",
    "replicas",
    "leader",
    "consumers",
    "newest snapshot",
    "configuration",
)

_UNLIMITED = ("max_age", "max_bytes", "max_msgs", "max_msgs_per_subject", "max_msg_size", "max_consumers")
_TIMES_NS = ("max_age", "duplicate_window", "subject_delete_marker_ttl")


async def streams(nats: NatsSettings, settings: StreamSettings, *, repair: bool, as_json: bool) -> int:
    """Print all streams; with `repair` first create and alter what loses nothing. 1 if one is not as it should be.

    Without `repair` it changes nothing: it also reads a namespace whose streams are missing. Raises `LogUnavailable`
    when no server answers.
    """
    kind = "operator" if repair else reader_kind(nats)
    async with connected(nats, kind, "streams") as client:
        done: list[RepairResult] = []
        if repair and not await site_of(client, nats.namespace):
            done = [await repair_stream(client, spec) for spec in await _wanted(client, nats, settings)]
        elif repair:
            done = await repair_mirrors(client, nats.namespace, settings)
        seen = await survey(client, nats.namespace, settings.replicas, settings.sizes)
        if kind == "operator":
            seen = await _probed(client, nats, settings, seen)
    is_whole = all(stream.whole for stream in seen) and not any(stream.refusal for stream in done)
    if as_json:
        document = {"whole": is_whole, "streams": [_document(stream) for stream in seen], "repaired": done}
        print(msgspec.json.format(msgspec.json.encode(document)).decode())
    else:
        print("\n".join([*_done(done, asked=repair), as_table(seen), *_advice(seen, repaired=repair)]))
    return 0 if is_whole else 1


async def _wanted(client: Connection, nats: NatsSettings, settings: StreamSettings) -> list[StreamSpec]:
    return await wanted_streams(client, nats.namespace, settings.replicas, settings.sizes)


async def _probed(
    client: Connection, nats: NatsSettings, settings: StreamSettings, seen: list[StreamStatus]
) -> list[StreamStatus]:
    """The same, with what an append to each stream came to. All at once: each may take its whole deadline."""
    specs = {spec.name: spec for spec in await _wanted(client, nats, settings)}

    async def look(status: StreamStatus) -> StreamStatus:
        if status.trouble or status.mirror is not None or status.name not in specs:
            return status
        return msgspec.structs.replace(
            status, trouble=await probe(client, nats.namespace, specs[status.name], SystemClock())
        )

    return list(await asyncio.gather(*(look(status) for status in seen)))


def as_table(seen: list[StreamStatus]) -> str:
    """One line for each stream."""
    return table(COLUMNS, [_row(status) for status in seen])


def _row(status: StreamStatus) -> tuple[object, ...]:
    contents = f"{status.what} {status.pool}".strip()
    if not status.replicas:
        return (status.name, contents, "", "", "", "", "", "", "", state(status))
    replicas = str(status.replicas)
    if status.current_replicas < status.replicas:
        replicas += f" ({status.current_replicas} current)"
    snapshot = ""
    if status.pool:
        at = "none" if status.snapshot is None else str(status.snapshot)
        snapshot = f"{at}, log {status.first} to {status.last}" if status.messages else f"{at}, log empty"
    return (
        status.name,
        contents,
        status.messages,
        size(status.bytes),
        duration(status.oldest_s) if status.messages else "",
        replicas,
        status.leader,
        status.consumers,
        snapshot,
        state(status),
    )


def state(status: StreamStatus) -> str:
    """Return how a stream stands to its wanted configuration, in one line."""
    if status.trouble:
        return status.trouble
    parts = []
    if status.mirror is not None:
        kinds = f" ({', '.join(status.mirror.kinds)})" if status.mirror.kinds else ""
        behind = f"{status.mirror.lag} messages behind" if status.mirror.lag else "current"
        parts.append(f"mirror of site {status.mirror.site}{kinds}, {behind}")
    if status.forgotten:
        parts.append("BROKEN: see below")
    if status.to_repair:
        parts.append("differs: " + ", ".join(f"{change(d)} ({d.cost})" for d in status.to_repair))
    operators = [f"{d.field} {value(d.field, d.has)}" for d in status.differences if d.operators]
    if not parts:
        parts.append("as wanted")
    if operators:
        parts.append("operator's: " + ", ".join(operators))
    return "; ".join(parts)


def change(difference: StreamDifference) -> str:
    """A field as it is, and as it should be."""
    return f"{difference.field} {value(difference.field, difference.has)} -> {value(difference.field, difference.wanted)}"


def value(field: str, has: Any) -> str:
    """A configuration's value for people."""
    match has:
        case bool():
            return "yes" if has else "no"
        case int() if has <= 0 and field in _UNLIMITED:
            return "none"
        case int() if field in _TIMES_NS:
            return duration(has / 1e9)
        case int() if field in ("max_bytes", "max_msg_size"):
            return size(has)
        case list():
            return "+".join(has) or "none"
        case _:
            return str(has)


def duration(seconds: float) -> str:
    """Rounded down to its largest unit, or with the next smaller one where it is below ten."""
    for unit, length in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return (
                f"{seconds / length:.3g} {unit}"
                if seconds < 10 * length
                else f"{seconds / length:.0f} {unit}"
            )
    return f"{seconds:.3g} s"


def size(count: int) -> str:
    """Bytes with a unit."""
    for unit, length in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= length:
            return f"{count / length:.3g} {unit}" if count < 1000 * length else f"{count // length} {unit}"
    return f"{count} B"


def _done(done: list[RepairResult], *, asked: bool) -> list[str]:
    lines = []
    for result in done:
        if result.created:
            lines.append(f"created {result.name}")
        lines += [f"altered {result.name}: {change(difference)}" for difference in result.altered]
        if result.refusal:
            lines.append(f"left {result.name}: {result.refusal}")
    if asked:
        lines = [*(lines or ["nothing to repair that can be done without losing anything"]), ""]
    return lines


def _advice(seen: list[StreamStatus], *, repaired: bool) -> list[str]:
    lines = []
    for status in seen:
        if status.forgotten:
            lines.append(
                f"BROKEN {status.name}: a new router of pool {status.pool} starts from nothing: {status.forgotten}.\n"
                "  cause: no router saved a snapshot for as long as the log keeps messages (max_age, max_bytes), "
                "or the log was purged or replaced by hand\n"
                "  fix: run a router of this pool: it asks all workers for their blocks and saves a snapshot "
                "within a minute of the next event; give the log a larger max_age or max_bytes "
                f"(`nats stream edit {status.name}`) if routers are away for longer"
            )
    safe = any(
        status.trouble == MISSING or any(d.cost == "safe" for d in status.to_repair) for status in seen
    )
    refused = any(d.cost != "safe" for status in seen for d in status.to_repair)
    if not repaired and (safe or refused):
        lines.append(
            "`headwater streams --repair` does what loses nothing, and says what to do about the rest"
        )
    return ["", *lines] if lines else []


def _document(status: StreamStatus) -> dict[str, Any]:
    document = msgspec.structs.asdict(status)
    return {**document, "whole": status.whole, "state": state(status)}


# `headwater pools`: creates streams as the operator, who alone may where users have limited rights.


async def create_pools(settings: PoolOperator, stop: asyncio.Event, *, watch: bool) -> int:
    """Create the namespace's streams, and the log of `pool` or of every pool with a card; print all streams.

    With `watch` logs of new pools are created as their cards appear, until `stop` is set; the process then has a metrics port, and is
    healthy once everything was created. Raises `ConfigError`.
    """
    nats, streams, pool = settings.nats, settings.streams, settings.pool
    if settings.metrics.port and not watch:
        raise ConfigError(
            "--metrics-port: a port for the time of one listing is of no use; give --watch, or 0"
        )
    ns, replicas = nats.namespace, streams.replicas
    board = ProbeBoard(settings.metrics.live_timeout_s)
    if settings.metrics.port:
        serve_metrics(settings.metrics, board=board, kind="operator")
    async with connected(nats, "operator", "pools") as client:

        async def make() -> None:
            await ensure_namespace(client, ns, replicas=replicas, sizes=streams.sizes)

        await (while_it_starts(make) if watch else make())
        cards = CardTable(JetStreamTable(client, subjects.card_bucket(ns)))
        for each_pool in [pool] if pool else await cards.pools():
            await ensure_pool(client, ns, each_pool, replicas=replicas, sizes=streams.sizes)
        for name in await stream_names(client, ""):
            print(name)
        if watch:
            keepers = [
                asyncio.create_task(keep_namespace(client, ns, replicas, streams.sizes)),
                asyncio.create_task(keep_pools(client, ns, replicas, streams.sizes)),
                asyncio.create_task(board.keep_beating(lambda: lambda: (True, {"status": "ok"}))),
            ]
            await stop.wait()
            for task in keepers:
                task.cancel()
    return 0
