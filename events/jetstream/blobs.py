"""`Blobs` on an object store bucket, in the layout of ADR-20, so that the stock tools can list and fetch them.

nats-py waits for an acknowledgement after every chunk and reads through its ordered consumer (8 MiB/s); here chunks are
published in windows and read through `Cursor`. Chunks of half a MiB are read twice as fast as the usual 128 KiB, and fit
the server's default message limit of 1 MiB.
"""

import asyncio
import base64
import secrets
from collections.abc import Callable
from typing import Any

import msgspec
from nats.aio.client import Client

from headwater.events.jetstream.api import REQUEST_DEADLINE_S, api, last_message, publish
from headwater.events.jetstream.cursor import PULL, Cursor
from headwater.events.ports import LogError, LogRefused, sha256, wrong_bytes
from headwater.schemas import subjects

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
            await self._purge_if_possible(nuid)
            raise
        digest = await _digest(view)
        await self._write(_Info(name, self._bucket, nuid, len(view), count, _spelled(digest)))
        if before is not None and not before.deleted:
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
        if info is None or info.deleted:
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
        if info is None or info.deleted:
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
        info = await self._info(name)
        return info is not None and not info.deleted

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
            found = await self._list_once()
            if found is not None:
                return sorted(name for name in found if name.startswith(prefix))
        raise LogRefused(f"bucket {self._bucket}: it changed during {LISTINGS_MAX} listings; list it again")

    async def _list_once(self) -> list[str] | None:
        """All names, None if the server announced entries that do not come: they were deleted while it sent the others."""
        cursor = Cursor(self._client, self._stream, subjects=(subjects.object_meta(self._bucket, ">"),))
        loop = asyncio.get_running_loop()
        found: list[str] = []
        try:
            async with asyncio.timeout(SILENCE_S) as limit:
                async for batch in cursor.messages(0, newest_per_subject=True):
                    infos = [msgspec.json.decode(raw.data, type=_Info) for raw in batch]
                    found += [info.name for info in infos if not info.deleted]
                    if not batch or batch[-1].pending == 0:
                        break
                    limit.reschedule(loop.time() + SILENCE_S)
        except TimeoutError:
            return None
        finally:
            await cursor.aclose()
        return found

    async def delete(self, name: str) -> None:
        """See `Blobs.delete`.

        The entry is removed with its content: a snapshot's objects have new names each time, and entries of
        deleted ones would fill the server's memory.
        """
        info = await self._info(name)
        if info is None or info.deleted:
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
        last = await last_message(self._client, self._stream, self._entry(name))
        return msgspec.json.decode(last.data, type=_Info) if last else None

    async def _write(self, info: _Info) -> int:
        headers = {"Nats-Rollup": "sub"}
        data = msgspec.json.encode(info)
        return (await publish(self._client, self._entry(info.name), data, headers, REQUEST_DEADLINE_S)).seq

    async def _purge(self, nuid: str) -> None:
        await api(self._client, f"STREAM.PURGE.{self._stream}", {"filter": self._chunks(nuid)})

    async def _purge_if_possible(self, nuid: str) -> None:
        try:
            await self._purge(nuid)
        except LogError:
            # Report the original error; what remains are chunks without an entry.
            pass


async def _digest(view: memoryview) -> str:
    return sha256(view) if len(view) <= INLINE_BYTES_MAX else await asyncio.to_thread(sha256, view)


def _spelled(digest: str) -> str:
    """A hex digest in ADR-20's format."""
    return "SHA-256=" + base64.urlsafe_b64encode(bytes.fromhex(digest)).decode()
