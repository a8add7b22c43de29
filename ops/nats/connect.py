"""Connections and ports of a process, the choice of its pool, and the restart of an embedded server whose store failed.

A file store that met an I/O error (a full or read-only disk) refuses every later write until the server is started
again, also long after there is room (nats-server 2.14 and newer; it continues to serve core NATS and reads). Where a write
was not permitted it disables JetStream altogether. The server's own health check reports both, but neither while it
starts. A restart loses nothing that was acknowledged, and helps only once the disk takes writes.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from headwater.actors.runtime.ports import Ports
from headwater.actors.runtime.tables import CardTable, LeaseTable
from headwater.events.jetstream import Connection, connect
from headwater.events.ports import LogError
from headwater.ops.config.sections import NatsSettings, StreamSettings
from headwater.ops.config.setting import ConfigError
from headwater.ops.nats.capture_ports import capture_ports
from headwater.ops.nats.config import credentials, reader_kind
from headwater.ops.nats.server import open_ports
from headwater.schemas import subjects
from headwater.schemas.subjects import InboxKind

DEFAULT_STREAMS = StreamSettings()


def operator_ports(nats: NatsSettings, name: str) -> AbstractAsyncContextManager[Ports]:
    """Ports of a command that reads: as the operator, or as an observer if only an observer's key is there; or of a capture."""
    if nats.capture:
        return capture_ports(Path(nats.capture))
    return ports_of(nats, reader_kind(nats), name)


def ports_of(
    nats: NatsSettings,
    kind: InboxKind,
    name: str,
    *,
    streams: StreamSettings = DEFAULT_STREAMS,
    cache_dir: Path | None = None,
    waits: bool = False,
) -> AbstractAsyncContextManager[Ports]:
    """Ports with the permissions of a kind of client, and missing streams created. `cache_dir`: where routers keep their newest snapshot.

    `waits`: the process runs until stopped, and may be started before the operator and with the servers.
    """
    return open_ports(
        nats.address,
        nats.namespace,
        name,
        kind=kind,
        credentials=credentials(nats, kind, name),
        replicas=streams.replicas,
        sizes=streams.sizes,
        cache_dir=cache_dir,
        waits=waits,
    )


async def open_connection(
    nats: NatsSettings, kind: InboxKind, name: str, *, inbox: str = "log", wait_s: float = 10.0
) -> Connection:
    """One connection with the permissions of a kind of client. Raises `LogUnavailable` and `AccessDenied`."""
    return await connect(
        nats.address,
        name,
        inbox=subjects.inbox(nats.namespace, kind, name, inbox),
        credentials=credentials(nats, kind, name),
        wait_s=wait_s,
    )


@contextlib.asynccontextmanager
async def connected(nats: NatsSettings, kind: InboxKind, name: str) -> AsyncIterator[Connection]:
    """`open_connection` until the block ends."""
    client = await open_connection(nats, kind, name)
    try:
        yield client
    finally:
        await client.close()


# Restart of the embedded nats-server once its store can be written again.

LOOK_S: Final = 1.0
ANSWER_S: Final = 2.0
ROOM_BYTES: Final = 4 * 1024 * 1024
"""What the disk must take, and keep free, before a restart."""

EVERY_STREAM: Final = "every stream"

_log = structlog.get_logger("headwater.nats")


async def watch_store(port: int, store: Path, restart: Callable[[], Awaitable[None]]) -> None:
    """Watch the server's health until cancelled; `port` is its monitoring port."""
    reported = False
    while True:
        await asyncio.sleep(LOOK_S)
        frozen = await frozen_streams(port)
        if frozen == {} or (frozen is None and not reported):
            reported = False
            continue
        if frozen and not reported:
            reported = True
            _log.error("store_not_persisting", streams=sorted(frozen), reason=next(iter(frozen.values())))
        reason = await asyncio.to_thread(why_no_room, store)
        if reason:
            _log.warning("nats_restart_delayed", reason=reason)
            continue
        _log.warning(
            "nats_restarting", reason="its store stopped at a write error, and the disk takes writes again"
        )
        await restart()
        reported = False


async def server_settings(host: str, port: int) -> dict[str, Any]:
    """What a server's monitoring port says of its settings. Raises `OSError`, `ValueError` or `TimeoutError`."""
    return await get_json(host, port, "/varz")


async def frozen_streams(port: int, host: str = "127.0.0.1") -> dict[str, str] | None:
    """Streams that take no writes any more, with the server's words; None where it does not answer.

    After a write error its health check may block for good, on the lock of a stream that waits for its store.
    """
    try:
        document = await get_json(host, port, "/healthz?details=true")
    except (OSError, ValueError, TimeoutError):
        return None
    by_stream = {}
    for failure in document.get("errors") or ():
        kind, words = failure.get("type"), str(failure.get("error", ""))
        if kind == "STREAM" and "write error" in words:
            by_stream[str(failure.get("stream", ""))] = words
        elif kind == "JETSTREAM" and "not enabled" in words:
            by_stream[EVERY_STREAM] = words
    return by_stream


def why_no_room(folder: Path) -> str:
    """Why the folder's disk takes no writes; empty where it does."""
    probe = folder / "probe"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with probe.open("wb") as file:
            file.write(bytes(ROOM_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return f"{folder}: {error.strerror or error}"
    finally:
        try:
            probe.unlink(missing_ok=True)
        except OSError as error:
            _log.debug("probe_not_removed", reason=str(error))
    return ""


async def get_json(host: str, port: int, path: str, *, timeout_s: float = ANSWER_S) -> dict[str, Any]:
    """The JSON object that a port for monitoring answers. Raises `OSError`, `ValueError` or `TimeoutError`."""
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(f"GET {path} HTTP/1.0\r\nhost: localhost\r\n\r\n".encode())
            answer = await reader.read()
        finally:
            writer.close()
    return msgspec.json.decode(answer.partition(b"\r\n\r\n")[2], type=dict[str, Any])


# The choice of a pool.


async def choose_pool(ports: Ports, requested: str) -> str:
    """`requested`, or the only pool, or the only one that has workers. Raises `ConfigError` if there is no such one, or several.

    A pool whose workers have all left can still be read: as long as its model card is there, and then as long as its log is. Without any
    card or log it cannot be said which pools there are.
    """
    pools = await CardTable(ports.cards).pools()
    if requested in pools or (not pools and requested):
        return requested
    logs = await _logs(ports) if requested or not pools else []
    if requested in logs:
        return requested
    if requested:
        names = ", ".join(sorted({*pools, *logs}))
        raise ConfigError(f"--pool {requested}: there is no such pool; there are: {names}")
    choices = pools or logs
    if len(choices) > 1:
        live = await live_pools(ports)
        served = [pool for pool in choices if pool in live]
        choices = served if len(served) == 1 else choices
    if len(choices) != 1:
        raise ConfigError(
            f"--pool: there are {len(choices)} pools ({', '.join(choices) or 'none'}); name one"
        )
    return choices[0]


async def live_pools(ports: Ports) -> set[str]:
    """The pools that have workers now."""
    return {lease.pool for lease in await LeaseTable(ports.leases).read_all() if lease.kind == "worker"}


async def first_pool(ports: Ports, model: str = "") -> str:
    """The pool of the first worker, of this model if one is given, that takes or renews its lease; waits for one.

    A lease that is merely there may be one that a killed fleet left a moment ago, as cards are of what earlier runs served.
    """
    cards = CardTable(ports.cards)
    is_first = True
    async for changes in LeaseTable(ports.leases).watch():
        pools = {
            held.pool for kind, _, held in changes if kind == "worker" and held is not None and held.pool
        }
        for pool in sorted(pools) if not is_first else ():
            if not model or await _serves(cards, pool, model):
                return pool
        is_first = False
    raise ConfigError("the lease table ended")


async def _serves(cards: CardTable, pool: str, model: str) -> bool:
    """Is the pool this model's? Its card may not be there yet: then its workers' next renewals of their leases ask again."""
    card = await cards.get_model(pool)
    return card is not None and card.name == model


async def _logs(ports: Ports) -> list[str]:
    """The pools that have a log; none where that may not be asked."""
    if ports.pool_logs is None:
        return []
    try:
        return await ports.pool_logs()
    except LogError:
        return []
