"""Objects that the edge stores for tenants: responses and conversations of the Responses API, generated images and videos.

An edge counts what it writes for a tenant. Each `COUNTED` of a share it asks the store for the sizes of all that the
tenant has, which other edges wrote as well, and deletes the oldest objects down to `KEPT` of the share. So n edges exceed
a share by at most n × `COUNTED` of it, for a moment. No state outlives the edge, and a tenant that stores little costs no
query.

An object is a head and, if it is larger than a message may be, further chunks. The chunks are written before the head, so
an object becomes visible whole. A store at its byte bound discards its oldest messages: an object that lost a chunk is
absent. Keys begin with a digest of the tenant, so that its objects can be counted (`shares`), and end in one of the tenant
and the id, so that one tenant's id names nothing of another's.

The head is replaced only if it has not changed since it was read, so two edges that add items at the same time both
succeed, one after the other. Items expire after their own time to live; a head lives on with each change.
"""

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from hashlib import blake2b
from typing import Any, Final, Literal, NamedTuple

import msgspec
import structlog

from headwater.actors import metrics
from headwater.actors.http.errors import ApiError, bad_request, overloaded
from headwater.events.ports import LogError
from headwater.events.table import KEY_BYTES, KeySize, Table
from headwater.schemas import subjects

COUNTED: Final = 1 / 8
KEPT: Final = 3 / 4

SHARE_DEADLINE_S: Final = 8.0
"""What is not deleted by then is deleted at a later write."""

DELETES_AT_ONCE: Final = 16
TENANTS_MAX: Final = 10_000
"""Counted tenants; of those beyond, the ones that wrote least recently begin again."""

_log = structlog.get_logger("headwater.history")


class StoredObjectSize(NamedTuple):
    """All messages of one object: its head last, and the bytes that they hold of the store."""

    keys: tuple[str, ...]
    bytes: int


class TenantShares:
    """The shares of tenants in the store, and the deletion of what exceeds them. `bytes_max` is each tenant's share; 0: no bound."""

    def __init__(self, table: Table, bytes_max: int) -> None:
        self._table = table
        self._bytes_max = bytes_max
        self._written: OrderedDict[str, int] = OrderedDict()
        self._trimming: set[str] = set()

    async def note(self, tenant: str, messages: int, size: int) -> None:
        """`tenant` (as in keys) stores an object of this many messages and bytes: make room for it if needed."""
        if not self._bytes_max:
            return
        written = self._written.pop(tenant, 0) + messages * KEY_BYTES + size
        self._written[tenant] = written
        if len(self._written) > TENANTS_MAX:
            self._written.popitem(last=False)
        if written < self._bytes_max * COUNTED or tenant in self._trimming:
            return
        self._trimming.add(tenant)
        try:
            async with asyncio.timeout(SHARE_DEADLINE_S):
                await self._trim(tenant, written)
            self._written[tenant] = 0
        except (LogError, TimeoutError) as error:
            _log.warning("history_not_trimmed", reason=str(error) or "no answer in time")
        finally:
            self._trimming.discard(tenant)

    async def _trim(self, tenant: str, coming: int) -> None:
        objects = objects_of(await self._table.sizes(tenant))
        stored = sum(stored_object.bytes for stored_object in objects)
        # What is about to be written may be among them already, or not.
        if stored + coming <= self._bytes_max:
            return
        excess = stored - int(self._bytes_max * KEPT)
        doomed: list[StoredObjectSize] = []
        for stored_object in objects:
            if excess <= 0:
                break
            doomed.append(stored_object)
            excess -= stored_object.bytes
        for first in range(0, len(doomed), DELETES_AT_ONCE):
            await asyncio.gather(
                *(self._delete(stored_object) for stored_object in doomed[first : first + DELETES_AT_ONCE])
            )
        metrics.HISTORY_TRIMMED.inc(len(doomed))
        _log.info("history_trimmed", objects=len(doomed), bytes_max=self._bytes_max)

    async def _delete(self, stored_object: StoredObjectSize) -> None:
        # The head first: without it the object is absent.
        for key in reversed(stored_object.keys):
            await self._table.delete(key, marker_s=1)


def objects_of(sizes: Iterable[KeySize]) -> list[StoredObjectSize]:
    """The objects that these messages make up, the oldest first; an object is as old as its newest message."""
    by_object: dict[str, list[KeySize]] = {}
    for key_size in sizes:
        by_object.setdefault(subjects.stored_object_of(key_size.key), []).append(key_size)
    newest = sorted(by_object.values(), key=lambda messages: max(key_size.revision for key_size in messages))
    return [
        StoredObjectSize(
            # Keys of chunks begin with the head's.
            tuple(key_size.key for key_size in sorted(messages, key=lambda key_size: -len(key_size.key))),
            sum(key_size.bytes + KEY_BYTES for key_size in messages),
        )
        for messages in newest
    ]


# Objects of any size in a `Table`, each whole or absent.

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
    """Objects of tenants in a table. Every call ends within `DEADLINE_S`, and raises `ApiError` 503 if the store is not available."""

    def __init__(
        self, table: Table, ttl_s: int, tenant_bytes_max: int = 0, object_bytes_max: int = OBJECT_BYTES_MAX
    ) -> None:
        self._table = table
        self._ttl_s = ttl_s
        self._object_bytes_max = object_bytes_max
        self._shares = TenantShares(table, tenant_bytes_max)

    async def put(self, tenant: str, kind: Kind, id_: str, data: bytes) -> None:
        """Store an object, or replace it. Raises `ApiError` 413 if it is too large."""
        key = _key(tenant, kind, id_)
        async with _available():
            head = await self._write_chunks(tenant, key, data)
            await self._table.put(key, head, ttl_s=self._ttl_s)

    async def create(self, tenant: str, kind: Kind, id_: str, data: bytes) -> bool:
        """Store an object under a new id. False if the id exists."""
        key = _key(tenant, kind, id_)
        async with _available():
            head = await self._write_chunks(tenant, key, data)
            return await self._table.create(key, head, ttl_s=self._ttl_s) is not None

    async def replace(self, tenant: str, kind: Kind, id_: str, data: bytes, revision: int) -> bool:
        """Replace the object unless it changed since this revision; False if it did."""
        key = _key(tenant, kind, id_)
        async with _available():
            head = await self._write_chunks(tenant, key, data)
            return await self._table.update(key, head, revision=revision, ttl_s=self._ttl_s) is not None

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
                chunks = await asyncio.gather(
                    *(self._table.get(_chunk_key(key, head.writing, number)) for number in numbers)
                )
                for chunk in chunks:
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
        contents: list[bytes | None] = []
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
            contents += [one.data if one is not None else None for one in some]
        return contents

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
    """Return what keys of a tenant's objects begin with."""
    return blake2b(tenant.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _chunk_key(key: str, writing: str, number: int) -> str:
    return subjects.stored_chunk_key(key, writing, number)


# Conversations: a head that lists segments, and segments with the items that were added together.

ITEMS_MAX: Final = 4_096
"""Items of a conversation: their ids must fit into one message."""

ATTEMPTS_MAX: Final = 20
"""Attempts to change a head that others change at the same time."""


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """Items that were added together: the id of the segment, and theirs."""

    id: str
    items: tuple[str, ...]


class ConversationHead(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation without the content of its items. `created_s` since the epoch."""

    id: str
    created_s: int
    metadata: dict[str, str] = {}
    segments: tuple[Segment, ...] = ()

    @property
    def count(self) -> int:
        """Number of items."""
        return sum(len(segment.items) for segment in self.segments)


Item = dict[str, Any]
_encode_json = msgspec.json.Encoder().encode
_decode_head = msgspec.json.Decoder(ConversationHead).decode
_decode_items = msgspec.json.Decoder(tuple[Item, ...]).decode


class ConversationStore:
    """Conversations of all tenants. `ids` makes names of segments."""

    def __init__(self, objects: TenantObjects, ids: Callable[[], str]) -> None:
        self._objects = objects
        self._ids = ids

    async def create(self, tenant: str, head: ConversationHead) -> None:
        """Store a new conversation. Its id is unique."""
        await self._objects.create(tenant, "conversation", head.id, _encode_json(head))

    async def get(self, tenant: str, id_: str) -> ConversationHead:
        """The head. Raises `ApiError` 404 for an unknown, expired or other tenant's id."""
        return (await self._read(tenant, id_))[0]

    async def _read(self, tenant: str, id_: str) -> tuple[ConversationHead, int]:
        stored = await self._objects.get(tenant, "conversation", id_)
        if stored is None:
            raise no_conversation(id_)
        return _decode_head(stored.data), stored.revision

    async def change(
        self, tenant: str, id_: str, change: Callable[[ConversationHead], ConversationHead]
    ) -> ConversationHead:
        """Replace the head by `change` of it, which may be called several times. Raises `ApiError` 404 or 503."""
        for _ in range(ATTEMPTS_MAX):
            head, revision = await self._read(tenant, id_)
            changed = change(head)
            if await self._objects.replace(tenant, "conversation", id_, _encode_json(changed), revision):
                return changed
        raise unavailable()

    async def delete(self, tenant: str, id_: str) -> None:
        """Delete a conversation with its items. Raises `ApiError` 404."""
        head = await self.get(tenant, id_)
        await self._objects.delete(tenant, "conversation", id_)
        for segment in head.segments:
            await self._objects.delete(tenant, "segment", segment.id)

    async def add(self, tenant: str, id_: str, items: Sequence[Item]) -> None:
        """Add items, which have ids, at the end. Raises `ApiError` 404, or 400 for a full conversation."""
        if not items:
            return
        segment = Segment(self._ids(), tuple(str(item["id"]) for item in items))

        def appended(head: ConversationHead) -> ConversationHead:
            check_room(head, len(items))
            return msgspec.structs.replace(head, segments=(*head.segments, segment))

        # Before the head, which makes them visible.
        await self._objects.put(tenant, "segment", segment.id, _encode_json(tuple(items)))
        try:
            await self.change(tenant, id_, appended)
        except ApiError:
            await self._objects.delete(tenant, "segment", segment.id)
            raise

    async def items(self, tenant: str, head: ConversationHead) -> tuple[Item, ...]:
        """All items that have not expired, the oldest first."""
        items: list[Item] = []
        ids = [segment.id for segment in head.segments]
        stored = await self._objects.get_all(tenant, "segment", ids, HISTORY_BYTES_MAX)
        for segment, data in zip(head.segments, stored, strict=True):
            if data is not None:
                listed = set(segment.items)
                items += [item for item in _decode_items(data) if item["id"] in listed]
        return tuple(items)

    async def delete_item(self, tenant: str, id_: str, item: str) -> ConversationHead:
        """Remove an item, and its content. Raises `ApiError` 404 for an unknown item."""
        touched: list[Segment] = []

        def without(head: ConversationHead) -> ConversationHead:
            touched[:] = [segment for segment in head.segments if item in segment.items]
            if not touched:
                raise no_item(item)
            segments = (
                Segment(part.id, tuple(other for other in part.items if other != item))
                for part in head.segments
            )
            return msgspec.structs.replace(head, segments=tuple(part for part in segments if part.items))

        head = await self.change(tenant, id_, without)
        for segment in touched:
            await self._erase(tenant, segment, item)
        return head

    async def _erase(self, tenant: str, segment: Segment, item: str) -> None:
        stored = await self._objects.get(tenant, "segment", segment.id)
        rest = [entry for entry in _decode_items(stored.data) if entry["id"] != item] if stored else []
        if rest:
            await self._objects.put(tenant, "segment", segment.id, _encode_json(rest))
        else:
            await self._objects.delete(tenant, "segment", segment.id)


def check_room(head: ConversationHead, more: int) -> None:
    """Raises `ApiError` 400 if the conversation has no room for this many items."""
    if head.count + more > ITEMS_MAX:
        raise bad_request(
            f"A conversation has at most {ITEMS_MAX} items; delete some, or begin another.",
            param="conversation",
            code="conversation_full",
        )


def no_conversation(id_: str) -> ApiError:
    """404 for an unknown conversation."""
    return ApiError(404, f"Conversation with id '{id_}' not found.", param="conversation", code="not_found")


def no_item(id_: str) -> ApiError:
    """404 for an unknown item."""
    return ApiError(404, f"Item with id '{id_}' not found.", param="item_id", code="not_found")


# Responses: each has its own items and the ids of the responses before it, not their items.

CHAIN_MAX: Final = 512
"""Responses of a chain. A longer conversation needs compaction, or a conversation object."""


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """One response. `input` and `resource["output"]` are items as the API shows them; `earlier` are the ids of the chain
    before it, the oldest first.
    """

    id: str
    earlier: tuple[str, ...] = ()
    input: tuple[dict[str, Any], ...] = ()
    resource: dict[str, Any] = {}

    def items(self) -> tuple[dict[str, Any], ...]:
        """Return what it adds to the conversation: input, then output."""
        return (*self.input, *self.resource["output"])


_decode_response = msgspec.json.Decoder(StoredResponse).decode


class ResponseStore:
    """Responses of all tenants."""

    def __init__(self, objects: TenantObjects) -> None:
        self._objects = objects

    async def put(self, tenant: str, response: StoredResponse) -> None:
        """Store a response. Raises `ApiError`."""
        await self._objects.put(tenant, "response", response.id, _encode_json(response))

    async def get(self, tenant: str, id_: str) -> StoredResponse | None:
        """A response, None if this tenant has none with the id (any more)."""
        stored = await self._objects.get(tenant, "response", id_)
        return _decode_response(stored.data) if stored is not None else None

    async def delete(self, tenant: str, id_: str) -> bool:
        """Delete a response. False if there is none."""
        return await self._objects.delete(tenant, "response", id_)

    async def chain(self, tenant: str, id_: str) -> tuple[StoredResponse, ...]:
        """A response with all before it, the oldest first.

        Raises `ApiError` 400 if it is unknown, or if one before it was deleted or expired: an answer to half of a
        conversation would be wrong without a sign of it.
        """
        last = await self.get(tenant, id_)
        if last is None:
            raise not_found_before(id_)
        earlier = await self._objects.get_all(tenant, "response", last.earlier, HISTORY_BYTES_MAX)
        chain = [_decode_response(data) for data in earlier if data is not None]
        if len(chain) < len(earlier):
            raise not_found_before(id_, "; a response before it was deleted or expired")
        return (*chain, last)


def not_found_before(id_: str, why: str = "") -> ApiError:
    """400: there is nothing to continue."""
    return bad_request(
        f"Previous response with id '{id_}' not found{why}.",
        param="previous_response_id",
        code="previous_response_not_found",
    )


def check_chain(length: int) -> None:
    """Raises `ApiError` 400 if a chain of this many responses may not be continued."""
    if length >= CHAIN_MAX:
        raise bad_request(
            f"The chain has {length} responses, the maximum. Continue from POST /v1/responses/compact, or use a "
            "conversation.",
            param="previous_response_id",
            code="chain_too_long",
        )
