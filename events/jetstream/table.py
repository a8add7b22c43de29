"""`Table` on a KV bucket: raw publishes with an expected last subject sequence, which is the revision.

A key's time to live is per message (`Nats-TTL`), never per bucket. When it expires the server writes a delete marker, so
watchers see an expired lease without polling.
"""

import asyncio
from collections.abc import AsyncGenerator
from typing import Final

import structlog
from nats.aio.client import Client

from headwater.events.jetstream.api import (
    REQUEST_DEADLINE_S,
    SUBJECT_BUSY,
    WRONG_LAST_SEQUENCE,
    api,
    last_message,
    publish,
)
from headwater.events.jetstream.cursor import Cursor, RawMessage
from headwater.events.ports import LogError, LogRefused, LogUnavailable, StreamMissing
from headwater.events.table import KeySize, TableEntry
from headwater.schemas import subjects

MISSING_S: Final = 0.5
"""Pause before checking again for a missing bucket."""

SIZES_S: Final = 30.0
"""A listing of sizes that takes longer is given up."""

_log = structlog.get_logger("headwater.table")

_EXPECTED = "Nats-Expected-Last-Subject-Sequence"
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
        headers = {_EXPECTED: str(revision)}
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
        found: list[KeySize] = []
        opened = 0
        try:
            async with asyncio.timeout(SIZES_S):
                async for batch in cursor.messages(0, newest_per_subject=True):
                    if cursor.opened != opened:
                        opened, found = cursor.opened, []
                    found += [
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
        return found

    async def watch(self) -> AsyncGenerator[list[TableEntry], None]:
        """See `Table.watch`. After a lost connection everything is read again and compared with what was yielded.

        Delete markers live for a second: a key that expired while disconnected may have left none. A deleted bucket
        is waited for; after it is re-created its revisions start at 1.
        """
        known: dict[str, TableEntry] = {}
        watched = _Watched(await self._created())
        while True:
            cursor = Cursor(self._client, self._stream, subjects=(self._prefix + ">",))
            try:
                async for entries in self._follow(cursor, known, watched):
                    yield entries
            except StreamMissing as error:
                _log.warning("bucket_missing", bucket=self._prefix, reason=str(error))
            finally:
                await cursor.aclose()
            await asyncio.sleep(MISSING_S)

    async def _follow(
        self, cursor: Cursor, known: dict[str, TableEntry], watched: "_Watched"
    ) -> AsyncGenerator[list[TableEntry], None]:
        present: dict[str, TableEntry] | None = None
        opened = 0
        async for batch in cursor.messages(0, newest_per_subject=True):
            entries = [self._entry(raw) for raw in batch]
            if cursor.opened != opened:
                opened, present = cursor.opened, {}
            if present is None:
                yield [entry for entry in entries if _is_newer(entry, known)]
                continue
            # Collect until this pass over all keys is complete.
            present.update((entry.key, entry) for entry in entries)
            if batch and batch[-1].pending:
                continue
            held = {key: entry for key, entry in present.items() if entry.value is not None}
            is_other = watched.is_replaced(await self._created())
            lost = [
                TableEntry(key, None, known[key].revision + 1, is_other)
                for key in sorted(known.keys() - held.keys())
            ]
            fresh = [entry for key, entry in held.items() if known.get(key) != entry]
            known.clear()
            known.update(held)
            present = None
            yield [*fresh, *lost]

    async def _created(self) -> str:
        """Return when the bucket was made: another one of the same name has lost what was in this one. "" where that is not known."""
        try:
            return str((await api(self._client, f"STREAM.INFO.{self._stream}"))["created"])
        except LogError as error:
            _log.debug("bucket_not_identified", bucket=self._prefix, reason=str(error))
            return ""

    def _entry(self, raw: RawMessage) -> TableEntry:
        gone = raw.headers and any(marker in raw.headers for marker in _MARKERS)
        return TableEntry(raw.subject.removeprefix(self._prefix), None if gone else raw.data, raw.position)


def _is_newer(entry: TableEntry, known: dict[str, TableEntry]) -> bool:
    """Is it a change to what was yielded? Then record it: one batch may change a key several times."""
    if entry.value is None:
        return known.pop(entry.key, None) is not None
    before = known.get(entry.key)
    if before is not None and entry.revision <= before.revision:
        return False
    known[entry.key] = entry
    return True
