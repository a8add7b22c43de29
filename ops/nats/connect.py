"""Connections and ports of a process, from its NATS settings; and the restart of an embedded server whose store failed.

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

from headwater.actors.runtime.persistence import Ports
from headwater.events.jetstream import Connection, connect
from headwater.ops.captures.ports import capture_ports
from headwater.ops.config.nats import NatsSettings, StreamSettings
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
    return await _get(port, "/varz", host)


async def frozen_streams(port: int, host: str = "127.0.0.1") -> dict[str, str] | None:
    """Streams that take no writes any more, with the server's words; None where it does not answer.

    After a write error its health check may block for good, on the lock of a stream that waits for its store.
    """
    try:
        document = await _get(port, "/healthz?details=true", host)
    except (OSError, ValueError, TimeoutError):
        return None
    found = {}
    for one in document.get("errors") or ():
        kind, words = one.get("type"), str(one.get("error", ""))
        if kind == "STREAM" and "write error" in words:
            found[str(one.get("stream", ""))] = words
        elif kind == "JETSTREAM" and "not enabled" in words:
            found[EVERY_STREAM] = words
    return found


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


async def _get(port: int, path: str, host: str) -> dict[str, Any]:
    async with asyncio.timeout(ANSWER_S):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(f"GET {path} HTTP/1.0\r\nhost: localhost\r\n\r\n".encode())
            answer = await reader.read()
        finally:
            writer.close()
    document: dict[str, Any] = msgspec.json.decode(answer.partition(b"\r\n\r\n")[2])
    return document
