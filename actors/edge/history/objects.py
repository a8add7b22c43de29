"""Objects of tenants in a `Table`: bytes of any size under a tenant's key, whole or absent.

An object is a head and, if it is larger than a message may be, further chunks. The chunks are written before the head, so
an object becomes visible whole. A store at its byte bound discards its oldest messages: an object that lost a chunk is
absent. Keys begin with a digest of the tenant, so that its objects can be counted (`shares`), and end in one of the tenant
and the id, so that one tenant's id names nothing of another's.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from hashlib import blake2b
from typing import Final, Literal

import msgspec
import structlog

from headwater.actors import metrics
from headwater.actors.edge.history.shares import TenantShares
from headwater.actors.http.errors import ApiError, bad_request, overloaded
from headwater.events.errors import LogError
from headwater.events.table import Table
from headwater.schemas import subjects

Kind = Literal["response", "conversation", "segment", "image", "video"]

CHUNK_BYTES: Final = 512 * 1024
"""Half of the usual maximum message."""

OBJECT_BYTES_MAX: Final = 16 * 1024 * 1024
CHUNKS_AT_ONCE: Final = 8
READS_AT_ONCE: Final = 16
HISTORY_BYTES_MAX: Final = 32 * 1024 * 1024
"""What one request may refer to."""

DEADLINE_S: Final = 10.0
"""A store that does not answer must not hang a request."""

_log = structlog.get_logger("headwater.history")


class _Head(msgspec.Struct, array_like=True):
    """The first message of an object. `chunks` more follow under keys with `writing`, which names this version."""

    data: bytes
    chunks: int = 0
    writing: str = ""


class StoredObject(msgspec.Struct, frozen=True):
    """An object's bytes, and the revision that a conditional replacement names."""

    data: bytes
    revision: int


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Head).decode


class TenantObjects:
    """See the module. Every call ends within `DEADLINE_S`, and raises `ApiError` 503 if the store is not available."""

    def __init__(
        self, table: Table, ttl_s: int, tenant_bytes_max: int = 0, object_bytes_max: int = OBJECT_BYTES_MAX
    ) -> None:
        self._table = table
        self._ttl_s = ttl_s
        self._object_bytes_max = object_bytes_max
        self._shares = TenantShares(table, tenant_bytes_max)

    async def put(self, tenant: str, kind: Kind, id_: str, data: bytes) -> None:
        """Store an object, or replace it. Raises `ApiError` 413 if it is too large."""
        async with _available():
            head = await self._write_chunks(tenant, _key(tenant, kind, id_), data)
            await self._table.put(_key(tenant, kind, id_), head, ttl_s=self._ttl_s)

    async def create(self, tenant: str, kind: Kind, id_: str, data: bytes) -> bool:
        """Store an object under a new id. False if the id exists."""
        async with _available():
            head = await self._write_chunks(tenant, _key(tenant, kind, id_), data)
            made = await self._table.create(_key(tenant, kind, id_), head, ttl_s=self._ttl_s)
            return made is not None

    async def replace(self, tenant: str, kind: Kind, id_: str, data: bytes, revision: int) -> bool:
        """Replace the object unless it changed since this revision; False if it did."""
        async with _available():
            head = await self._write_chunks(tenant, _key(tenant, kind, id_), data)
            made = await self._table.update(
                _key(tenant, kind, id_), head, revision=revision, ttl_s=self._ttl_s
            )
            return made is not None

    async def get(self, tenant: str, kind: Kind, id_: str) -> StoredObject | None:
        """The object, None if it is unknown, expired, deleted or another tenant's."""
        key = _key(tenant, kind, id_)
        async with _available():
            entry = await self._table.get(key)
            if entry is None or entry.value is None:
                return None
            head = _decode(entry.value)
            pieces = [head.data]
            for first in range(1, head.chunks + 1, CHUNKS_AT_ONCE):
                numbers = range(first, min(first + CHUNKS_AT_ONCE, head.chunks + 1))
                found = await asyncio.gather(
                    *(self._table.get(_chunk_key(key, head.writing, number)) for number in numbers)
                )
                for chunk in found:
                    if chunk is None or chunk.value is None:
                        return None
                    pieces.append(chunk.value)
            return StoredObject(b"".join(pieces), entry.revision)

    async def get_all(
        self, tenant: str, kind: Kind, ids: Sequence[str], bytes_max: int
    ) -> list[bytes | None]:
        """Objects in the order of their ids, None for those that `get` does not find. Stops reading at `bytes_max`.

        Raises `ApiError` 400 beyond it, so that no history fills an edge's memory.
        """
        found: list[bytes | None] = []
        size = 0
        for first in range(0, len(ids), READS_AT_ONCE):
            some = await asyncio.gather(
                *(self.get(tenant, kind, one) for one in ids[first : first + READS_AT_ONCE])
            )
            size += sum(len(one.data) for one in some if one is not None)
            if size > bytes_max:
                raise bad_request(
                    f"The stored conversation is larger than {bytes_max} bytes; compact it, or begin another.",
                    code="conversation_too_large",
                )
            found += [one.data if one is not None else None for one in some]
        return found

    async def delete(self, tenant: str, kind: Kind, id_: str) -> bool:
        """Delete the object. False if there is none."""
        key = _key(tenant, kind, id_)
        async with _available():
            entry = await self._table.get(key)
            if entry is None or entry.value is None:
                return False
            head = _decode(entry.value)
            await self._table.delete(key, marker_s=1)
            for number in range(1, head.chunks + 1):
                await self._table.delete(_chunk_key(key, head.writing, number), marker_s=1)
            return True

    async def _write_chunks(self, tenant: str, key: str, data: bytes) -> bytes:
        """Make room for the object, and write what does not fit into its head; returns the head."""
        if len(data) > self._object_bytes_max:
            raise bad_request(
                f"What is to be stored has {len(data)} bytes; the maximum is {self._object_bytes_max}. Send store: false.",
                param="store",
                code="object_too_large",
            )
        count = max(0, -(-len(data) // CHUNK_BYTES) - 1)
        if tenant:
            await self._shares.note(tenant_token(tenant), count + 1, len(data))
        writing = secrets.token_hex(4) if count else ""
        for first in range(1, count + 1, CHUNKS_AT_ONCE):
            numbers = range(first, min(first + CHUNKS_AT_ONCE, count + 1))
            await asyncio.gather(
                *(
                    self._table.put(
                        _chunk_key(key, writing, number),
                        data[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES],
                        ttl_s=self._ttl_s,
                    )
                    for number in numbers
                )
            )
        return _encode(_Head(data[:CHUNK_BYTES], count, writing))


@asynccontextmanager
async def _available() -> AsyncIterator[None]:
    """Raises `ApiError` 503 for a store that fails or does not answer."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield
    except (LogError, TimeoutError) as error:
        _log.warning("history_unavailable", reason=str(error) or "no answer in time")
        metrics.HISTORY_FAILURES.inc()
        raise unavailable() from error


def unavailable() -> ApiError:
    """503 for what needs the store."""
    return overloaded("The store of responses is not available; retry, or send store: false.", 1.0)


def _key(tenant: str, kind: Kind, id_: str) -> str:
    digest = blake2b(f"{len(tenant)}:{tenant}:{id_}".encode("utf-8", "surrogatepass"), digest_size=20)
    return subjects.stored_object_key(tenant_token(tenant), kind, digest.hexdigest())


def tenant_token(tenant: str) -> str:
    """What keys of a tenant's objects begin with."""
    return blake2b(tenant.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _chunk_key(key: str, writing: str, number: int) -> str:
    return subjects.stored_chunk_key(key, writing, number)
