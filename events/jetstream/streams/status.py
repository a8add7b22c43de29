"""The status of every stream of a namespace; creates and changes none."""

import asyncio
import contextlib
from contextlib import aclosing
from typing import Any

import msgspec
import structlog
from nats.aio.client import Client

from headwater.events.errors import AccessDenied, LogError, LogRefused, StreamMissing
from headwater.events.jetstream.api import SECOND_NS, api, parse_time_ns
from headwater.events.jetstream.blobs import JetStreamBlobs
from headwater.events.jetstream.reader import bounds_of
from headwater.events.jetstream.streams.diff import StreamDifference, compare
from headwater.events.jetstream.streams.ensure import stream_names
from headwater.events.jetstream.streams.spec import StreamSpec, namespace_streams, pool_log_stream
from headwater.events.jetstream.table import JetStreamTable
from headwater.events.log import Bounds
from headwater.events.snapshots.retention import forgotten
from headwater.events.table import STREAM_SIZES, StreamSizes
from headwater.schemas import subjects

READ_S = 5.0
"""Readers wait for a lost server without limit; a survey does not."""

_log = structlog.get_logger("headwater.streams")


class StreamStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status of one stream. Of a missing or silent one only name, purpose and `trouble` are known."""

    name: str
    what: str
    pool: str = ""
    trouble: str = ""
    """`missing`, or why the server reported nothing about it."""
    messages: int = 0
    bytes: int = 0
    oldest_s: float = 0.0
    first: int = 0
    last: int = 0
    consumers: int = 0
    replicas: int = 0
    current_replicas: int = 0
    """Replicas that are online and current, including the leader."""
    leader: str = ""
    differences: tuple[StreamDifference, ...] = ()
    snapshot: int | None = None
    """Of a pool log: position of its newest snapshot."""
    forgotten: str = ""
    """Of a pool log: why a new router cannot continue from its newest snapshot."""

    @property
    def whole(self) -> bool:
        """Is no repair needed?"""
        return not (self.trouble or self.forgotten or self.to_repair)

    @property
    def to_repair(self) -> tuple[StreamDifference, ...]:
        """Differences that are not operators' settings."""
        return tuple(one for one in self.differences if not one.operators)


async def wanted_streams(
    client: Client, ns: str, replicas: int, sizes: StreamSizes = STREAM_SIZES
) -> list[StreamSpec]:
    """The streams that a namespace should have: its own, and a log for each pool with a log or a card.

    Raises `LogUnavailable` when the server does not answer.
    """
    prefix = subjects.pool_stream_prefix(ns)
    pools = set()
    for name in await stream_names(client, prefix):
        # Another namespace's name may start with ours, so its subjects decide. A stream that this client may not
        # read is reported by the survey itself.
        has: list[str] = []
        with contextlib.suppress(AccessDenied):
            has = (await api(client, f"STREAM.INFO.{name}"))["config"].get("subjects") or []
        if not has or any(subjects.in_namespace(ns, subject) for subject in has):
            pools.add(name.removeprefix(prefix))
    try:
        pools |= await _pools_with_a_card(client, ns)
    except StreamMissing:
        pass  # no cards yet
    except (LogRefused, TimeoutError) as error:
        # The survey reports the problem of the card table itself.
        _log.warning("cards_unreadable", reason=str(error) or f"no answer within {READ_S:.0f} s")
    return [
        *(pool_log_stream(ns, pool, replicas) for pool in sorted(pools)),
        *namespace_streams(ns, replicas, sizes),
    ]


async def survey(
    client: Client, ns: str, replicas: int, sizes: StreamSizes = STREAM_SIZES
) -> list[StreamStatus]:
    """The status of every wanted stream. Raises `LogUnavailable` when the server does not answer at all."""
    specs = await wanted_streams(client, ns, replicas, sizes)
    return [await _status_of(client, ns, spec) for spec in specs]


async def _status_of(client: Client, ns: str, spec: StreamSpec) -> StreamStatus:
    try:
        info = await api(client, f"STREAM.INFO.{spec.name}")
        seen = _read(spec, info)
        if not spec.pool:
            return seen
        # Snapshots are read after the log: a newer one may appear in between, never an older one.
        saved = await _newest_snapshot(client, ns, spec.pool)
        bounds = Bounds(seen.first, seen.last)
        if saved is not None and saved > bounds.last:
            bounds = bounds_of((await api(client, f"STREAM.INFO.{spec.name}"))["state"])
        return msgspec.structs.replace(seen, snapshot=saved, forgotten=forgotten(*bounds, saved or 0))
    except StreamMissing:
        return StreamStatus(name=spec.name, what=spec.what, pool=spec.pool, trouble="missing")
    except LogError as error:
        return StreamStatus(name=spec.name, what=spec.what, pool=spec.pool, trouble=str(error))
    except TimeoutError:
        trouble = f"the snapshots of pool {spec.pool} cannot be listed within {READ_S:.0f} s"
        return msgspec.structs.replace(seen, trouble=trouble)


def _read(spec: StreamSpec, info: dict[str, Any]) -> StreamStatus:
    state, cluster = info["state"], info.get("cluster") or {}
    bounds = bounds_of(state)
    messages = int(state["messages"])
    age_ns = parse_time_ns(info["ts"]) - parse_time_ns(state["first_ts"]) if messages else 0
    followers = cluster.get("replicas") or []
    return StreamStatus(
        name=spec.name,
        what=spec.what,
        pool=spec.pool,
        messages=messages,
        bytes=int(state["bytes"]),
        oldest_s=max(age_ns / SECOND_NS, 0.0),
        first=bounds.first,
        last=bounds.last,
        consumers=int(state.get("consumer_count", 0)),
        replicas=int(info["config"]["num_replicas"]),
        current_replicas=1 + sum(bool(one.get("current")) and not one.get("offline") for one in followers),
        leader=cluster.get("leader", ""),
        differences=tuple(compare(spec, info)),
    )


async def _newest_snapshot(client: Client, ns: str, pool: str) -> int | None:
    blobs = JetStreamBlobs(client, subjects.blob_bucket(ns))
    try:
        async with asyncio.timeout(READ_S):
            names = await blobs.names(subjects.snapshot_prefix(pool))
    except StreamMissing:
        return None
    return subjects.snapshot_position(names[-1]) if names else None


async def _pools_with_a_card(client: Client, ns: str) -> set[str]:
    bucket = subjects.card_bucket(ns)
    # A watch would wait for a bucket that does not exist.
    await api(client, f"STREAM.INFO.{subjects.table_stream(bucket)}")
    table = JetStreamTable(client, bucket)
    async with asyncio.timeout(READ_S), aclosing(table.watch()) as watch:
        entries = await anext(watch)
    return {entry.key for entry in entries if entry.value is not None and subjects.card_pool(entry.key)}
