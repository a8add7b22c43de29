"""`Table` on a KV bucket and `Blobs` on an object store bucket.

The table publishes raw messages with an expected last subject sequence, which is the revision.
A key's time to live is per message (`Nats-TTL`), never per bucket. When it expires the server writes a delete marker, so
watchers see an expired lease without polling.

Blobs are in the layout of ADR-20, so that the stock tools can list and fetch them.
nats-py waits for an acknowledgement after every chunk and reads through its ordered consumer (8 MiB/s); here chunks are
published in windows and read through `Cursor`. Chunks of half a MiB are read twice as fast as the usual 128 KiB, and fit
the server's default message limit of 1 MiB.
"""

import asyncio
import base64
import contextlib
import secrets
from collections.abc import AsyncGenerator, Callable
from typing import Any, Final

import msgspec
import structlog
from nats.aio.client import Client

from headwater.events.jetstream.api import (
    EXPECTED,
    REQUEST_DEADLINE_S,
    SUBJECT_BUSY,
    WRONG_LAST_SEQUENCE,
    api,
    last_message,
    publish,
    stream_info,
)
from headwater.events.jetstream.cursor import PULL, Cursor, RawMessage
from headwater.events.ports import LogError, LogRefused, LogUnavailable, StreamMissing, sha256, wrong_bytes
from headwater.events.table import KeySize, TableEntry
from headwater.schemas import subjects

MISSING_S: Final = 0.5
"""Pause before checking again for a missing bucket."""

SIZES_S: Final = 30.0
"""A listing of sizes that takes longer is given up."""

_log = structlog.get_logger("headwater.table")

_TTL = "Nats-TTL"
_SIZE = "Nats-Msg-Size"
_MARKERS = ("KV-Operation", "Nats-Marker-Reason")


class _Watched:
    """The bucket that is watched, known by the time at which it was made; "" where that is not known."""

    def __init__(self, created: str) -> None:
        self._created = created

    def is_replaced(self, created: str) -> bool:
        """Is it another one now?"""
        before, self._created = self._created, created or self._created
        return bool(before and created) and before != created


class JetStreamTable:
    """See `headwater.events.table.Table`."""

    def __init__(self, client: Client, bucket: str) -> None:
        self._client = client
        self._stream = subjects.table_stream(bucket)
        self._prefix = subjects.table_subject(bucket, "")

    async def create(self, key: str, value: bytes, *, ttl_s: int = 0) -> int | None:
        """See `Table.create`."""
        revision = await self.update(key, value, revision=0, ttl_s=ttl_s)
        if revision is not None:
            return revision
        # The key's subject exists: by a value, or only by the marker of a deleted one.
        last = await last_message(self._client, self._stream, self._prefix + key)
        if last is None:
            return await self.update(key, value, revision=0, ttl_s=ttl_s)
        if any(marker in last.headers for marker in _MARKERS):
            return await self.update(key, value, revision=last.seq, ttl_s=ttl_s)
        return None

    async def update(self, key: str, value: bytes, *, revision: int, ttl_s: int = 0) -> int | None:
        """See `Table.update`."""
        headers = {EXPECTED: str(revision)}
        if ttl_s:
            headers[_TTL] = f"{ttl_s}s"
        try:
            ack = await publish(self._client, self._prefix + key, value, headers, REQUEST_DEADLINE_S)
        except LogRefused as error:
            if error.code in (WRONG_LAST_SEQUENCE, SUBJECT_BUSY):
                return None
            raise
        return ack.seq

    async def put(self, key: str, value: bytes, *, ttl_s: int = 0) -> int:
        """See `Table.put`."""
        headers = {_TTL: f"{ttl_s}s"} if ttl_s else {}
        return (await publish(self._client, self._prefix + key, value, headers, REQUEST_DEADLINE_S)).seq

    async def delete(self, key: str, *, marker_s: int = 0) -> None:
        """See `Table.delete`."""
        headers = {"KV-Operation": "PURGE", "Nats-Rollup": "sub"}
        if marker_s:
            headers[_TTL] = f"{marker_s}s"
        await publish(self._client, self._prefix + key, b"", headers, REQUEST_DEADLINE_S)

    async def get(self, key: str) -> TableEntry | None:
        """See `Table.get`."""
        last = await last_message(self._client, self._stream, self._prefix + key)
        if last is None or any(marker in last.headers for marker in _MARKERS):
            return None
        return TableEntry(key, last.data, last.seq)

    async def sizes(self, prefix: str) -> list[KeySize]:
        """See `Table.sizes`. Only headers are read."""
        where = f"{self._prefix}{prefix}.>"
        cursor = Cursor(self._client, self._stream, subjects=(where,), headers_only=True)
        key_sizes: list[KeySize] = []
        opened = 0
        try:
            async with asyncio.timeout(SIZES_S):
                async for batch in cursor.messages(0, newest_per_subject=True):
                    if cursor.opened != opened:
                        opened, key_sizes = cursor.opened, []
                    key_sizes += [
                        KeySize(raw.subject.removeprefix(self._prefix), int(raw.headers[_SIZE]), raw.position)
                        for raw in batch
                        if raw.headers is not None and not any(marker in raw.headers for marker in _MARKERS)
                    ]
                    if not batch or not batch[-1].pending:
                        break
        except TimeoutError as error:
            raise LogUnavailable(f"{where}: no answer within {SIZES_S:g} s") from error
        finally:
            await cursor.aclose()
        return key_sizes

    async def watch(self) -> AsyncGenerator[list[TableEntry], None]:
        """See `Table.watch`. After a lost connection everything is read again and compared with what was yielded.

        Delete markers live for a second: a key that expired while disconnected may have left none. A deleted bucket
        is waited for; after it is re-created its revisions start at 1.
        """
        yielded: dict[str, TableEntry] = {}
        watched = _Watched(await self._created())
        while True:
            cursor = Cursor(self._client, self._stream, subjects=(self._prefix + ">",))
            try:
                async for entries in self._follow(cursor, yielded, watched):
                    yield entries
            except StreamMissing as error:
                _log.warning("bucket_missing", bucket=self._prefix, reason=str(error))
            finally:
                await cursor.aclose()
            await asyncio.sleep(MISSING_S)

    async def _follow(
        self, cursor: Cursor, yielded: dict[str, TableEntry], watched: _Watched
    ) -> AsyncGenerator[list[TableEntry], None]:
        present: dict[str, TableEntry] | None = None
        opened = 0
        async for batch in cursor.messages(0, newest_per_subject=True):
            entries = [self._entry(raw) for raw in batch]
            if cursor.opened != opened:
                opened, present = cursor.opened, {}
            if present is None:
                yield [entry for entry in entries if _is_newer(entry, yielded)]
                continue
            # Collect until this pass over all keys is complete.
            present.update((entry.key, entry) for entry in entries)
            if batch and batch[-1].pending:
                continue
            held = {key: entry for key, entry in present.items() if entry.value is not None}
            is_other = watched.is_replaced(await self._created())
            lost = [
                TableEntry(key, None, yielded[key].revision + 1, is_other)
                for key in sorted(yielded.keys() - held.keys())
            ]
            fresh = [entry for key, entry in held.items() if yielded.get(key) != entry]
            yielded.clear()
            yielded.update(held)
            present = None
            yield [*fresh, *lost]

    async def _created(self) -> str:
        """Return when the bucket was made: another one of the same name has lost what was in this one. "" where that is not known."""
        try:
            return str((await stream_info(self._client, self._stream))["created"])
        except LogError as error:
            _log.debug("bucket_not_identified", bucket=self._prefix, reason=str(error))
            return ""

    def _entry(self, raw: RawMessage) -> TableEntry:
        gone = raw.headers and any(marker in raw.headers for marker in _MARKERS)
        return TableEntry(raw.subject.removeprefix(self._prefix), None if gone else raw.data, raw.position)


def _is_newer(entry: TableEntry, yielded: dict[str, TableEntry]) -> bool:
    """Is it a change to what was yielded? Then record it: one batch may change a key several times."""
    if entry.value is None:
        return yielded.pop(entry.key, None) is not None
    before = yielded.get(entry.key)
    if before is not None and entry.revision <= before.revision:
        return False
    yielded[entry.key] = entry
    return True


CHUNK_BYTES_MAX = 512 * 1024
WINDOW_BYTES = 4 * 1024 * 1024
"""Unacknowledged bytes of an object; also what is written to the socket in one turn of the event loop."""

INLINE_BYTES_MAX = 1024 * 1024
"""Up to this, hashing on the loop takes less than a millisecond; more is hashed in a thread."""

SILENCE_S = 3.0
LISTINGS_MAX = 4


class _Info(msgspec.Struct):
    """The object's metadata in the bucket, in ADR-20's format."""

    name: str
    bucket: str
    nuid: str
    size: int
    chunks: int
    digest: str = ""
    deleted: bool = False
    mtime: str = ""
    options: dict[str, Any] = {}


class JetStreamBlobs:
    """See `headwater.events.ports.Blobs`."""

    def __init__(self, client: Client, bucket: str) -> None:
        self._client = client
        self._bucket = bucket
        self._stream = subjects.object_stream(bucket)

    async def put(self, name: str, data: bytes | memoryview) -> str:
        """See `Blobs.put`. The entry is written after the last chunk is acknowledged."""
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        before = await self._info(name)
        nuid = secrets.token_hex(11)
        try:
            count = await self._write_chunks(nuid, view)
        except LogError:
            # Where that fails, too, chunks without an entry remain. The original error is reported.
            with contextlib.suppress(LogError):
                await self._purge(nuid)
            raise
        digest = await _digest(view)
        await self._write(_Info(name, self._bucket, nuid, len(view), count, _spelled(digest)))
        if before is not None:
            await self._purge(before.nuid)
        return digest

    async def _write_chunks(self, nuid: str, view: memoryview) -> int:
        # Half of the server's limit, which includes subject and headers.
        size = min(CHUNK_BYTES_MAX, max(1, self._client.max_payload // 2))
        window = max(1, WINDOW_BYTES // size) * size
        subject = self._chunks(nuid)
        for begin in range(0, len(view), window):
            end = min(begin + window, len(view))
            # Tasks start, and so publish on the one connection, in their order here.
            await asyncio.gather(
                *(
                    publish(self._client, subject, bytes(view[at : at + size]), {}, REQUEST_DEADLINE_S)
                    for at in range(begin, end, size)
                )
            )
        return -(-len(view) // size)

    async def get(self, name: str) -> bytes | None:
        """See `Blobs.get`."""
        info = await self._info(name)
        if info is None:
            return None
        pieces: list[bytes] = []
        await self._read(info, pieces.append)
        data = b"".join(pieces)
        if _spelled(await _digest(memoryview(data))) != info.digest:
            raise LogRefused(wrong_bytes(name))
        return data

    async def read_into(self, name: str, into: memoryview, digest: str) -> bool:
        """See `Blobs.read_into`."""
        info = await self._info(name)
        if info is None:
            return False
        at = 0

        def take(piece: bytes) -> None:
            nonlocal at
            if at + len(piece) > len(into):
                raise LogRefused(wrong_bytes(name))
            into[at : at + len(piece)] = piece
            at += len(piece)

        await self._read(info, take)
        # Only the expected digest is checked, not the entry's own: bytes that match it are correct.
        if at != len(into) or await _digest(into) != digest:
            raise LogRefused(wrong_bytes(name))
        return True

    async def has(self, name: str) -> bool:
        """See `Blobs.has`."""
        return await self._info(name) is not None

    async def _read(self, info: _Info, take: Callable[[bytes], None]) -> None:
        """Deliver the stored chunks. Raises `LogRefused` when they were deleted while being read."""
        if not info.chunks:
            return
        loop = asyncio.get_running_loop()
        piece_bytes = max(1, info.size // info.chunks)
        pull = min(PULL, max(2, WINDOW_BYTES // piece_bytes))
        cursor = Cursor(self._client, self._stream, subjects=(self._chunks(info.nuid),), pull=pull)
        seen = 0
        try:
            async with asyncio.timeout(SILENCE_S) as limit:
                async for batch in cursor.messages(0):
                    for raw in batch:
                        take(raw.data)
                    seen += len(batch)
                    if not batch or seen >= info.chunks or not batch[-1].pending:
                        return
                    limit.reschedule(loop.time() + SILENCE_S)
        except TimeoutError:
            raise LogRefused(
                f"object {info.name}: {SILENCE_S:.0f} s without its next chunk; read it again"
            ) from None
        finally:
            await cursor.aclose()

    async def names(self, prefix: str) -> list[str]:
        """See `Blobs.names`. Raises `LogRefused` if entries are deleted all the while."""
        for _ in range(LISTINGS_MAX):
            listed = await self._list_once()
            if listed is not None:
                return sorted(name for name in listed if name.startswith(prefix))
        raise LogRefused(f"bucket {self._bucket}: it changed during {LISTINGS_MAX} listings; list it again")

    async def _list_once(self) -> list[str] | None:
        """All names, None if the server announced entries that do not come: they were deleted while it sent the others."""
        cursor = Cursor(self._client, self._stream, subjects=(subjects.object_meta(self._bucket, ">"),))
        loop = asyncio.get_running_loop()
        names: list[str] = []
        try:
            async with asyncio.timeout(SILENCE_S) as limit:
                async for batch in cursor.messages(0, newest_per_subject=True):
                    infos = [msgspec.json.decode(raw.data, type=_Info) for raw in batch]
                    names += [info.name for info in infos if not info.deleted]
                    if not batch or batch[-1].pending == 0:
                        break
                    limit.reschedule(loop.time() + SILENCE_S)
        except TimeoutError:
            return None
        finally:
            await cursor.aclose()
        return names

    async def delete(self, name: str) -> None:
        """See `Blobs.delete`.

        The entry is removed with its content: a snapshot's objects have new names each time, and entries of
        deleted ones would fill the server's memory.
        """
        info = await self._info(name)
        if info is None:
            return
        marker = await self._write(_Info(name, self._bucket, info.nuid, 0, 0, deleted=True))
        await self._purge(info.nuid)
        # Only up to the marker: the name may have been stored again since.
        entry = {"filter": self._entry(name), "seq": marker + 1}
        await api(self._client, f"STREAM.PURGE.{self._stream}", entry)

    def _chunks(self, nuid: str) -> str:
        return subjects.object_chunks(self._bucket, nuid)

    def _entry(self, name: str) -> str:
        return subjects.object_meta(self._bucket, base64.urlsafe_b64encode(name.encode()).decode())

    async def _info(self, name: str) -> _Info | None:
        """The entry of an object; None where there is none, or it was deleted."""
        last = await last_message(self._client, self._stream, self._entry(name))
        info = msgspec.json.decode(last.data, type=_Info) if last else None
        return None if info is None or info.deleted else info

    async def _write(self, info: _Info) -> int:
        headers = {"Nats-Rollup": "sub"}
        data = msgspec.json.encode(info)
        return (await publish(self._client, self._entry(info.name), data, headers, REQUEST_DEADLINE_S)).seq

    async def _purge(self, nuid: str) -> None:
        await api(self._client, f"STREAM.PURGE.{self._stream}", {"filter": self._chunks(nuid)})


async def _digest(view: memoryview) -> str:
    return sha256(view) if len(view) <= INLINE_BYTES_MAX else await asyncio.to_thread(sha256, view)


def _spelled(digest: str) -> str:
    """A hex digest in ADR-20's format."""
    return "SHA-256=" + base64.urlsafe_b64encode(bytes.fromhex(digest)).decode()
