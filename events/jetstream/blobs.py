"""`Blobs` on an object store bucket, in the layout of ADR-20, so the stock tools list and fetch them.

nats-py waits for an acknowledgement after every chunk and reads through its ordered consumer (8 MiB/s); here
chunks go out in windows and come back through our own cursor.
"""

import asyncio
import base64
import hashlib
import secrets
from typing import Any

import msgspec
from nats.aio.client import Client

from headwater.events.errors import LogRefused
from headwater.events.jetstream.api import REQUEST_DEADLINE_S, api, last_message, publish
from headwater.events.jetstream.cursor import Cursor

CHUNK_BYTES = 128 * 1024
WINDOW_CHUNKS = 16
SILENCE_S = 3.0


class _Info(msgspec.Struct):
    """The object's entry in the bucket, as ADR-20 spells it."""

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
    """See `headwater.events.blobs.Blobs`."""

    def __init__(self, client: Client, bucket: str) -> None:
        self._client = client
        self._bucket = bucket
        self._stream = f"OBJ_{bucket}"

    async def put(self, name: str, data: bytes) -> None:
        """See `Blobs.put`. The entry is written after the last chunk is acknowledged."""
        before = await self._info(name)
        nuid = secrets.token_hex(11)
        subject = self._chunks(nuid)
        view = memoryview(data)
        chunks = [view[at : at + CHUNK_BYTES] for at in range(0, len(view), CHUNK_BYTES)]
        for at in range(0, len(chunks), WINDOW_CHUNKS):
            # Tasks start, and so publish on the one connection, in the order they are given.
            await asyncio.gather(
                *(
                    publish(self._client, subject, bytes(chunk), {}, REQUEST_DEADLINE_S)
                    for chunk in chunks[at : at + WINDOW_CHUNKS]
                )
            )
        digest = "SHA-256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()
        await self._write(_Info(name, self._bucket, nuid, len(data), len(chunks), digest))
        if before is not None and not before.deleted:
            await self._purge(before.nuid)

    async def get(self, name: str) -> bytes | None:
        """See `Blobs.get`."""
        info = await self._info(name)
        if info is None or info.deleted:
            return None
        parts: list[bytes] = []
        if info.chunks:
            try:
                parts = await self._read(info)
            except TimeoutError:
                raise LogRefused(
                    f"object {name}: {SILENCE_S:.0f} s without its next chunk; read it again"
                ) from None
        data = b"".join(parts)
        digest = "SHA-256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()
        if digest != info.digest:
            raise LogRefused(
                f"object {name}: its bytes do not match its digest; delete it and let it be remade"
            )
        return data

    async def has(self, name: str) -> bool:
        """See `Blobs.has`."""
        info = await self._info(name)
        return info is not None and not info.deleted

    async def _read(self, info: _Info) -> list[bytes]:
        """The chunks there are. Raises TimeoutError when they were taken away under the reader."""
        loop = asyncio.get_running_loop()
        cursor = Cursor(self._client, self._stream, filter_subject=self._chunks(info.nuid))
        parts: list[bytes] = []
        try:
            async with asyncio.timeout(SILENCE_S) as limit:
                async for batch in cursor.messages(0):
                    parts += [raw.data for raw in batch]
                    if not batch or len(parts) >= info.chunks or not batch[-1].pending:
                        return parts
                    limit.reschedule(loop.time() + SILENCE_S)
        finally:
            await cursor.aclose()
        return parts

    async def names(self, prefix: str) -> list[str]:
        """See `Blobs.names`."""
        cursor = Cursor(self._client, self._stream, filter_subject=f"$O.{self._bucket}.M.>")
        found: list[str] = []
        try:
            async for batch in cursor.messages(0, newest_per_subject=True):
                infos = [msgspec.json.decode(raw.data, type=_Info) for raw in batch]
                found += [info.name for info in infos if not info.deleted]
                if not batch or batch[-1].pending == 0:
                    break
        finally:
            await cursor.aclose()
        return sorted(name for name in found if name.startswith(prefix))

    async def delete(self, name: str) -> None:
        """See `Blobs.delete`."""
        info = await self._info(name)
        if info is None or info.deleted:
            return
        await self._write(_Info(name, self._bucket, info.nuid, 0, 0, deleted=True))
        await self._purge(info.nuid)

    def _chunks(self, nuid: str) -> str:
        return f"$O.{self._bucket}.C.{nuid}"

    def _entry(self, name: str) -> str:
        return f"$O.{self._bucket}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"

    async def _info(self, name: str) -> _Info | None:
        last = await last_message(self._client, self._stream, self._entry(name))
        return msgspec.json.decode(last.data, type=_Info) if last else None

    async def _write(self, info: _Info) -> None:
        headers = {"Nats-Rollup": "sub"}
        await publish(
            self._client, self._entry(info.name), msgspec.json.encode(info), headers, REQUEST_DEADLINE_S
        )

    async def _purge(self, nuid: str) -> None:
        await api(self._client, f"STREAM.PURGE.{self._stream}", {"filter": self._chunks(nuid)})
