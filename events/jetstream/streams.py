"""The streams on the server: created, probed, compared with their specifications, and repaired.

Nothing here deletes or purges. An alteration sends the server's configuration with our fields replaced: an operator's
settings are kept, and a server in strict mode (2.12) receives no unknown field. JetStream has no compare-and-set for
configurations: two concurrent alterations may overwrite each other, and a repetition repairs that.

After a write error a store replies to no publish until its server is restarted (nats-server 2.14 and newer). The probe
has no effect: in a log it is an empty batch of a reserved writer, in a bucket the purge of a reserved key.
"""

import asyncio
import contextlib
from contextlib import aclosing
from typing import Any, Final

import msgspec
import structlog
from nats.aio.client import Client

from headwater.events.jetstream.api import (
    INVALID_JSON,
    SECOND_NS,
    STREAM_NAME_IN_USE,
    api,
    parse_time_ns,
    publish,
    stream_info,
)
from headwater.events.jetstream.buckets import JetStreamBlobs, JetStreamTable
from headwater.events.jetstream.copies import MirrorStatus, refuse_mirrored, site_of, status_of
from headwater.events.jetstream.cursor import bounds_of
from headwater.events.jetstream.log import JetStreamLog
from headwater.events.jetstream.stream_spec import (
    StreamDifference,
    StreamSpec,
    compare,
    mirror_of,
    mirrored,
    namespace_streams,
    pool_log_stream,
    repairable,
)
from headwater.events.ports import (
    AccessDenied,
    Bounds,
    Entry,
    LogError,
    LogFull,
    LogRefused,
    LogUnavailable,
    Stored,
    StreamMissing,
)
from headwater.events.snapshot_store import forgotten
from headwater.events.table import STREAM_SIZES, StreamSizes
from headwater.schemas import subjects
from headwater.schemas.clock import Clock
from headwater.schemas.encoding import SCHEMA_VERSION, Batch, seal
from headwater.schemas.names import PROBE

_log = structlog.get_logger("headwater.streams")


class RepairResult(msgspec.Struct, frozen=True):
    """The result for one stream. `left` are differences that remain; `refusal` says why, and what to do."""

    name: str
    created: bool = False
    altered: tuple[StreamDifference, ...] = ()
    left: tuple[StreamDifference, ...] = ()
    refusal: str = ""

    @property
    def whole(self) -> bool:
        """Does the stream now match its specification, except for its operator's settings?"""
        return not self.left and not self.refusal


async def repair(
    client: Client, spec: StreamSpec, *, limits: bool = True, alter: bool = True
) -> RepairResult:
    """Create the stream, or alter what loses no messages; without `limits` limits are not changed.

    Without `alter` an existing stream is only compared: for a client without permission to alter it. Idempotent,
    and never deletes. What the server rejects is part of the result, except that a stream that cannot be created
    raises `LogRefused`, or `StreamMissing` when this client may not create it. Raises `LogUnavailable` when the
    server does not answer.
    """
    try:
        info = await stream_info(client, spec.name)
    except StreamMissing:
        if await _create(client, spec):
            return RepairResult(spec.name, created=True)
        info = await stream_info(client, spec.name)
    altered: list[StreamDifference] = []
    refusals: list[str] = []
    config: dict[str, Any] = info["config"]
    to_alter = repairable(compare(spec, info), limits=limits)
    if to_alter and not alter:
        refusals.append(
            f"{', '.join(difference.field for difference in to_alter)} should be altered, and only the operator may: "
            "run `headwater streams --repair` with the operator's key"
        )
    for group in _groups(to_alter if alter else []):
        change = {difference.field: difference.wanted for difference in group}
        try:
            config = (await api(client, f"STREAM.UPDATE.{spec.name}", config | change))["config"]
        except LogRefused as error:
            refusals.append(f"the server rejected {', '.join(sorted(change))}: {error}")
        else:
            altered += group
    unrepaired = tuple(
        difference for difference in compare(spec, {**info, "config": config}) if not difference.operators
    )
    refusals += [_refusal(spec, difference) for difference in unrepaired if difference.cost != "safe"]
    return RepairResult(spec.name, False, tuple(altered), unrepaired, "; ".join(refusals))


async def ensure(client: Client, spec: StreamSpec, *, alter: bool = True) -> None:
    """Create a missing stream, add missing capabilities and replicas; every process does this at its start.

    Limits are not changed. What cannot be altered is logged and does not prevent the start, as the stream may work
    nevertheless. Raises as `repair` does.
    """
    done = await repair(client, spec, limits=False, alter=alter)
    if done.altered:
        _log.info(
            "stream_altered", stream=spec.name, fields=[difference.field for difference in done.altered]
        )
    if done.refusal:
        _log.warning("stream_differs", stream=spec.name, reason=done.refusal)


def _groups(differences: list[StreamDifference]) -> list[list[StreamDifference]]:
    """Groups of alterations: the rejection of one group must not prevent the others."""
    kinds: dict[int, list[StreamDifference]] = {0: [], 1: [], 2: []}
    for difference in differences:
        kinds[2 if difference.field == "num_replicas" else int(difference.limit)].append(difference)
    return [group for group in kinds.values() if group]


async def _create(client: Client, spec: StreamSpec) -> bool:
    """Create the stream. False when another process just created it with other settings."""
    try:
        await api(client, f"STREAM.CREATE.{spec.name}", spec.config())
    except AccessDenied as error:
        raise StreamMissing(
            f"stream {spec.name} does not exist, and only the operator may create it: "
            "run `headwater pools` with the operator's key"
        ) from error
    except LogRefused as error:
        if error.code == STREAM_NAME_IN_USE:
            return False
        if error.code == INVALID_JSON:
            raise LogRefused(f"{error}; Headwater needs nats-server 2.14 or newer", error.code) from error
        raise
    except LogFull as error:
        # No space will be freed while a process starts: what is reserved has to be less.
        raise LogRefused(
            f"stream {spec.name} reserves {max(spec.max_bytes, 0)} bytes, which the NATS server's store does not have: {error}. Give "
            "smaller --stream-sizes, or the server a larger store"
        ) from error
    except LogUnavailable as error:
        raise LogUnavailable(f"stream {spec.name} could not be created: {error}") from error
    return True


def _refusal(spec: StreamSpec, difference: StreamDifference) -> str:
    mismatch = f"{difference.field} is {difference.has} and should be {difference.wanted}"
    if difference.cost == "would lose":
        return (
            f"{mismatch}: altering it now would delete stored messages. If that is meant, "
            f"`nats stream edit {spec.name}` does it"
        )
    if difference.cost == "promotes":
        return (
            f"stream {spec.name} is a mirror of {difference.has}, and takes no writes: if its original is lost for good, "
            "`headwater streams --promote` makes it the original"
        )
    return (
        f"{mismatch}: no server alters that on an existing stream. Stop the fleet, back it up "
        f"(`nats stream backup {spec.name} FOLDER`), delete it (`nats stream rm {spec.name}`) and start again; "
        f"what is lost with it: {_HOLDS[spec.what]}"
    )


_HOLDS = {
    "pool log": "routing history and decisions; workers reannounce themselves and their blocks",
    "request log": "the record of requests; requests in flight cannot be resumed",
    "leases": "nothing permanent: every process renews its lease",
    "model cards": "nothing permanent: workers write their cards again",
    "stored responses": "stored responses and conversations; clients must send their history again",
    "video jobs": "the record of videos: those in progress are not finished, finished ones cannot be found",
    "objects": "snapshots and tokenizer files; routers fold the log from its start, workers store the files again",
}


# Creation of the missing streams of a namespace and of a pool, as every process does at its start.

POLL_S = 0.1


async def ensure_namespace(
    client: Client,
    ns: str,
    *,
    replicas: int = 1,
    alter: bool = True,
    patience_s: float = 0.0,
    sizes: StreamSizes = STREAM_SIZES,
) -> None:
    """Ensure the streams and buckets that every process of a namespace needs. See `ensure`. Waits up to `patience_s` for the operator to
    create each of them first. Raises `MirroredHere`.
    """
    await refuse_mirrored(client, ns)
    for spec in namespace_streams(ns, replicas, sizes):
        await _wait_for(client, spec.name, patience_s)
        await ensure(client, spec, alter=alter)


async def ensure_pool(
    client: Client,
    ns: str,
    pool: str,
    *,
    replicas: int = 1,
    alter: bool = True,
    patience_s: float = 0.0,
    sizes: StreamSizes = STREAM_SIZES,
) -> None:
    """Ensure the log of one pool. See `ensure`. Waits up to `patience_s` for the operator to create it first."""
    await _wait_for(client, subjects.pool_stream(ns, pool), patience_s)
    await ensure(client, pool_log_stream(ns, pool, replicas, sizes), alter=alter)


async def _wait_for(client: Client, name: str, patience_s: float) -> None:
    """Return once the stream exists, or after `patience_s`."""
    loop = asyncio.get_running_loop()
    end = loop.time() + patience_s
    while loop.time() < end and not await exists(client, name):
        await asyncio.sleep(POLL_S)


async def exists(client: Client, name: str) -> bool:
    """Is there a stream of this name?"""
    try:
        await stream_info(client, name)
    except StreamMissing:
        return False
    return True


async def stream_names(client: Client, prefix: str) -> list[str]:
    """Names of the streams that start with `prefix`, sorted."""
    names: list[str] = []
    while True:
        answer = await api(client, "STREAM.NAMES", {"offset": len(names)})
        page = answer.get("streams") or []
        names += page
        if len(names) >= int(answer.get("total", 0)) or not page:
            return sorted(name for name in names if name.startswith(prefix))


# Probing a stream by appending to it: the stream's information does not show a frozen store.

ANSWER_S: Final = 3.0

FROZEN: Final = (
    "not persisting: an append was not acknowledged within 3 s. Free space on the server's disk; if it was full or read-only, "
    "restart that nats-server (`headwater up` restarts its own)"
)


async def probe(client: Client, ns: str, spec: StreamSpec, clock: Clock) -> str:
    """Append to the stream; returns the problem, empty where it was stored or where this client may not append."""
    try:
        if spec.what in ("pool log", "request log"):
            subject = (
                subjects.pool_subject(ns, spec.pool, "load", PROBE)
                if spec.pool
                else subjects.request_subject(ns, PROBE)
            )
            return await _append(JetStreamLog(client, spec.name), subject, clock)
        bucket = spec.name.partition("_")[2]
        subject = (
            subjects.object_chunks(bucket, PROBE)
            if spec.name == subjects.object_stream(bucket)
            else subjects.table_subject(bucket, PROBE)
        )
        await publish(client, subject, b"", {"KV-Operation": "PURGE", "Nats-Rollup": "sub"}, ANSWER_S)
    except AccessDenied:
        return ""
    except LogError as error:
        return f"{FROZEN} ({error})"
    return ""


async def _append(log: JetStreamLog, subject: str, clock: Clock) -> str:
    newest = await log.newest(subject)
    batch: Batch[None] = Batch(
        version=SCHEMA_VERSION,
        writer=PROBE,
        epoch=newest.epoch + 1,
        seq=1,
        wall_ns=clock.wall_ns(),
        events=(),
        previous=newest.digest,
    )
    result = await log.append(Entry(subject, seal(batch)), deadline_s=ANSWER_S)
    return "" if isinstance(result, Stored) else FROZEN


# The status of every stream of a namespace. Nothing is created or changed.

READ_S = 5.0
"""Readers wait for a lost server without limit; a survey does not."""


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
    """The position of a pool log's newest snapshot."""
    forgotten: str = ""
    """The reason why a new router cannot continue from a pool log's newest snapshot."""
    mirror: MirrorStatus | None = None
    """Of a stream that copies another site's."""

    @property
    def whole(self) -> bool:
        """Is no repair needed?"""
        return not (self.trouble or self.forgotten or self.to_repair)

    @property
    def to_repair(self) -> tuple[StreamDifference, ...]:
        """Differences that are not operators' settings."""
        return tuple(difference for difference in self.differences if not difference.operators)


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
            has = (await stream_info(client, name))["config"].get("subjects") or []
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
        *(pool_log_stream(ns, pool, replicas, sizes) for pool in sorted(pools)),
        *namespace_streams(ns, replicas, sizes),
    ]


async def survey(
    client: Client, ns: str, replicas: int, sizes: StreamSizes = STREAM_SIZES
) -> list[StreamStatus]:
    """The status of every wanted stream; of a mirrored namespace those that there are. Raises `LogUnavailable` when the server does not answer at all."""
    specs = await wanted_streams(client, ns, replicas, sizes)
    site = await site_of(client, ns)
    statuses = [await _status_of(client, ns, spec, site) for spec in specs]
    return [status for status in statuses if not (site and status.trouble == MISSING)]


MISSING: Final = "missing"


async def _status_of(client: Client, ns: str, spec: StreamSpec, site: str) -> StreamStatus:
    try:
        info = await stream_info(client, spec.name)
        mirror = mirror_of(info["config"])
        if site and mirror is not None:
            # What it copies is its operator's choice. No router runs on it.
            status = status_of(info)
            assert status is not None
            return msgspec.structs.replace(
                _read(mirrored(spec, mirror), info), mirror=status, trouble=status.trouble
            )
        seen = _read(spec, info)
        if not spec.pool:
            return seen
        # Snapshots are read after the log: a newer one may appear in between, never an older one.
        saved = await _newest_snapshot(client, ns, spec.pool)
        bounds = Bounds(seen.first, seen.last)
        if saved is not None and saved > bounds.last:
            bounds = bounds_of((await stream_info(client, spec.name))["state"])
        return msgspec.structs.replace(seen, snapshot=saved, forgotten=forgotten(*bounds, saved or 0))
    except StreamMissing:
        return StreamStatus(name=spec.name, what=spec.what, pool=spec.pool, trouble=MISSING)
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
        current_replicas=1
        + sum(bool(follower.get("current")) and not follower.get("offline") for follower in followers),
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
    await stream_info(client, subjects.table_stream(bucket))
    table = JetStreamTable(client, bucket)
    async with asyncio.timeout(READ_S), aclosing(table.watch()) as watch:
        entries = await anext(watch)
    return {entry.key for entry in entries if entry.value is not None and subjects.card_pool(entry.key)}
