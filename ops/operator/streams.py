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


async def streams(nats: NatsSettings, wanted: StreamSettings, *, repair: bool, as_json: bool) -> int:
    """Print all streams; with `repair` first create and alter what loses nothing. 1 if one is not as it should be.

    Without `repair` it changes nothing: it also reads a namespace whose streams are missing. Raises `LogUnavailable`
    when no server answers.
    """
    kind = "operator" if repair else reader_kind(nats)
    async with connected(nats, kind, "streams") as client:
        done: list[RepairResult] = []
        if repair and not await site_of(client, nats.namespace):
            done = [await repair_stream(client, spec) for spec in await _wanted(client, nats, wanted)]
        elif repair:
            done = await repair_mirrors(client, nats.namespace, wanted)
        seen = await survey(client, nats.namespace, wanted.replicas, wanted.sizes)
        if kind == "operator":
            seen = await _probed(client, nats, wanted, seen)
    whole = all(one.whole for one in seen) and not any(one.refusal for one in done)
    if as_json:
        document = {"whole": whole, "streams": [_document(one) for one in seen], "repaired": done}
        print(msgspec.json.format(msgspec.json.encode(document)).decode())
    else:
        print("\n".join([*_done(done, asked=repair), as_table(seen), *_advice(seen, repaired=repair)]))
    return 0 if whole else 1


async def _wanted(client: Connection, nats: NatsSettings, wanted: StreamSettings) -> list[StreamSpec]:
    return await wanted_streams(client, nats.namespace, wanted.replicas, wanted.sizes)


async def _probed(
    client: Connection, nats: NatsSettings, wanted: StreamSettings, seen: list[StreamStatus]
) -> list[StreamStatus]:
    """The same, with what an append to each stream came to. All at once: each may take its whole deadline."""
    specs = {spec.name: spec for spec in await _wanted(client, nats, wanted)}

    async def look(one: StreamStatus) -> StreamStatus:
        if one.trouble or one.mirror is not None or one.name not in specs:
            return one
        return msgspec.structs.replace(
            one, trouble=await probe(client, nats.namespace, specs[one.name], SystemClock())
        )

    return list(await asyncio.gather(*(look(one) for one in seen)))


def as_table(seen: list[StreamStatus]) -> str:
    """One line for each stream."""
    return table(COLUMNS, [_row(one) for one in seen])


def _row(one: StreamStatus) -> tuple[object, ...]:
    what = f"{one.what} {one.pool}".strip()
    if not one.replicas:
        return (one.name, what, "", "", "", "", "", "", "", state(one))
    replicas = str(one.replicas)
    if one.current_replicas < one.replicas:
        replicas += f" ({one.current_replicas} current)"
    snapshot = ""
    if one.pool:
        at = "none" if one.snapshot is None else str(one.snapshot)
        snapshot = f"{at}, log {one.first} to {one.last}" if one.messages else f"{at}, log empty"
    return (
        one.name,
        what,
        one.messages,
        size(one.bytes),
        duration(one.oldest_s) if one.messages else "",
        replicas,
        one.leader,
        one.consumers,
        snapshot,
        state(one),
    )


def state(one: StreamStatus) -> str:
    """Return how a stream stands to its wanted configuration, in one line."""
    if one.trouble:
        return one.trouble
    parts = []
    if one.mirror is not None:
        kinds = f" ({', '.join(one.mirror.kinds)})" if one.mirror.kinds else ""
        behind = f"{one.mirror.lag} messages behind" if one.mirror.lag else "current"
        parts.append(f"mirror of site {one.mirror.site}{kinds}, {behind}")
    if one.forgotten:
        parts.append("BROKEN: see below")
    if one.to_repair:
        parts.append("differs: " + ", ".join(f"{change(d)} ({d.cost})" for d in one.to_repair))
    operators = [f"{d.field} {value(d.field, d.has)}" for d in one.differences if d.operators]
    if not parts:
        parts.append("as wanted")
    if operators:
        parts.append("operator's: " + ", ".join(operators))
    return "; ".join(parts)


def change(one: StreamDifference) -> str:
    """A field as it is, and as it should be."""
    return f"{one.field} {value(one.field, one.has)} -> {value(one.field, one.wanted)}"


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
    for one in done:
        if one.created:
            lines.append(f"created {one.name}")
        lines += [f"altered {one.name}: {change(difference)}" for difference in one.altered]
        if one.refusal:
            lines.append(f"left {one.name}: {one.refusal}")
    if asked:
        lines = [*(lines or ["nothing to repair that can be done without losing anything"]), ""]
    return lines


def _advice(seen: list[StreamStatus], *, repaired: bool) -> list[str]:
    lines = []
    for one in seen:
        if one.forgotten:
            lines.append(
                f"BROKEN {one.name}: a new router of pool {one.pool} starts from nothing: {one.forgotten}.\n"
                "  cause: no router saved a snapshot for as long as the log keeps messages (max_age, max_bytes), "
                "or the log was purged or replaced by hand\n"
                "  fix: run a router of this pool: it asks all workers for their blocks and saves a snapshot "
                "within a minute of the next event; give the log a larger max_age or max_bytes "
                f"(`nats stream edit {one.name}`) if routers are away for longer"
            )
    safe = any(one.trouble == MISSING or any(d.cost == "safe" for d in one.to_repair) for one in seen)
    refused = any(d.cost != "safe" for one in seen for d in one.to_repair)
    if not repaired and (safe or refused):
        lines.append(
            "`headwater streams --repair` does what loses nothing, and says what to do about the rest"
        )
    return ["", *lines] if lines else []


def _document(one: StreamStatus) -> dict[str, Any]:
    document = msgspec.structs.asdict(one)
    return {**document, "whole": one.whole, "state": state(one)}


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
        for one in [pool] if pool else await cards.pools():
            await ensure_pool(client, ns, one, replicas=replicas, sizes=streams.sizes)
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
