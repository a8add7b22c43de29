"""Stored conversations: a head that lists segments, and segments with the items that were added together.

The head is replaced only if it has not changed since it was read, so two edges that add items at the same time both
succeed, one after the other. Items expire after their own time to live; a head lives on with each change.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from headwater.actors.edge.history.objects import HISTORY_BYTES_MAX, TenantObjects, unavailable
from headwater.actors.http.errors import ApiError, bad_request

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
_encode = msgspec.json.Encoder().encode
_decode_head = msgspec.json.Decoder(ConversationHead).decode
_decode_items = msgspec.json.Decoder(tuple[Item, ...]).decode


class ConversationStore:
    """Conversations of all tenants. `ids` makes names of segments."""

    def __init__(self, objects: TenantObjects, ids: Callable[[], str]) -> None:
        self._objects = objects
        self._ids = ids

    async def create(self, tenant: str, head: ConversationHead) -> None:
        """Store a new conversation. Its id is unique."""
        await self._objects.create(tenant, "conversation", head.id, _encode(head))

    async def get(self, tenant: str, id_: str) -> ConversationHead:
        """The head. Raises `ApiError` 404 for an unknown, expired or other tenant's id."""
        return (await self._read(tenant, id_))[0]

    async def _read(self, tenant: str, id_: str) -> tuple[ConversationHead, int]:
        found = await self._objects.get(tenant, "conversation", id_)
        if found is None:
            raise no_conversation(id_)
        return _decode_head(found.data), found.revision

    async def change(
        self, tenant: str, id_: str, change: Callable[[ConversationHead], ConversationHead]
    ) -> ConversationHead:
        """Replace the head by `change` of it, which may be called several times. Raises `ApiError` 404 or 503."""
        for _ in range(ATTEMPTS_MAX):
            head, revision = await self._read(tenant, id_)
            changed = change(head)
            if await self._objects.replace(tenant, "conversation", id_, _encode(changed), revision):
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
        await self._objects.put(tenant, "segment", segment.id, _encode(tuple(items)))
        try:
            await self.change(tenant, id_, appended)
        except ApiError:
            await self._objects.delete(tenant, "segment", segment.id)
            raise

    async def items(self, tenant: str, head: ConversationHead) -> tuple[Item, ...]:
        """All items that have not expired, the oldest first."""
        found: list[Item] = []
        ids = [segment.id for segment in head.segments]
        stored = await self._objects.get_all(tenant, "segment", ids, HISTORY_BYTES_MAX)
        for segment, data in zip(head.segments, stored, strict=True):
            if data is not None:
                listed = set(segment.items)
                found += [item for item in _decode_items(data) if item["id"] in listed]
        return tuple(found)

    async def delete_item(self, tenant: str, id_: str, item: str) -> ConversationHead:
        """Remove an item, and its content. Raises `ApiError` 404 for an unknown item."""
        touched: list[Segment] = []

        def without(head: ConversationHead) -> ConversationHead:
            touched[:] = [segment for segment in head.segments if item in segment.items]
            if not touched:
                raise no_item(item)
            segments = (
                Segment(one.id, tuple(other for other in one.items if other != item)) for one in head.segments
            )
            return msgspec.structs.replace(head, segments=tuple(one for one in segments if one.items))

        head = await self.change(tenant, id_, without)
        for segment in touched:
            await self._erase(tenant, segment, item)
        return head

    async def _erase(self, tenant: str, segment: Segment, item: str) -> None:
        stored = await self._objects.get(tenant, "segment", segment.id)
        rest = [one for one in _decode_items(stored.data) if one["id"] != item] if stored else []
        if rest:
            await self._objects.put(tenant, "segment", segment.id, _encode(rest))
        else:
            await self._objects.delete(tenant, "segment", segment.id)


def check_room(head: ConversationHead, more: int) -> None:
    """Raises `ApiError` 400 if the conversation has no room for so many items."""
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
