"""The HTTP endpoints under `/v1/conversations`."""

from collections.abc import Callable
from typing import Any, Final

import msgspec

from headwater.actors.edge.api.responses.endpoints import answer
from headwater.actors.edge.api.responses.items.stored import listed
from headwater.actors.edge.api.responses.items.types import Item, is_hosted, read_item
from headwater.actors.edge.api.responses.load_history import Stores, resolve_references, storage_off
from headwater.actors.edge.api.responses.types import (
    ConversationFields,
    ConversationItems,
    ConversationUpdate,
)
from headwater.actors.edge.history.conversations import ConversationHead, no_item
from headwater.actors.edge.request.context import Call
from headwater.actors.http.decoding import decode_body
from headwater.actors.http.paging import page_of, page_request

_create: Final = msgspec.json.Decoder(ConversationFields)
_update: Final = msgspec.json.Decoder(ConversationUpdate)
_items: Final = msgspec.json.Decoder(ConversationItems)


class ConversationsApi:
    """See the module."""

    def __init__(self, stores: Stores | None, ids: Callable[[], str], now_s: Callable[[], int]) -> None:
        self._stores_or_none = stores
        self._ids = ids
        self._now_s = now_s

    @property
    def _stores(self) -> Stores:
        if self._stores_or_none is None:
            raise storage_off("conversation")
        return self._stores_or_none

    async def create(self, call: Call) -> None:
        """POST /v1/conversations."""
        fields: ConversationFields = decode_body(_create, call.body or b"{}")
        tenant = call.principal.tenant
        items = await self._checked(fields.items or [], tenant)
        head = ConversationHead(
            id=f"conv_{self._ids()}", created_s=self._now_s(), metadata=fields.metadata or {}
        )
        await self._stores.conversations.create(tenant, head)
        await self._stores.conversations.add(tenant, head.id, items)
        await answer(call, _shown(head))

    async def get(self, call: Call, id_: str) -> None:
        """GET /v1/conversations/{id}."""
        await answer(call, _shown(await self._stores.conversations.get(call.principal.tenant, id_)))

    async def update(self, call: Call, id_: str) -> None:
        """POST /v1/conversations/{id}."""
        fields: ConversationUpdate = decode_body(_update, call.body)
        head = await self._stores.conversations.change(
            call.principal.tenant,
            id_,
            lambda head: msgspec.structs.replace(head, metadata=fields.metadata or {}),
        )
        await answer(call, _shown(head))

    async def delete(self, call: Call, id_: str) -> None:
        """DELETE /v1/conversations/{id}."""
        await self._stores.conversations.delete(call.principal.tenant, id_)
        await answer(call, {"id": id_, "object": "conversation.deleted", "deleted": True})

    async def list_items(self, call: Call, query: bytes, id_: str) -> None:
        """GET /v1/conversations/{id}/items."""
        page = page_request(query)
        await answer(call, page_of(await self._items_of(call, id_), page))

    async def add_items(self, call: Call, id_: str) -> None:
        """POST /v1/conversations/{id}/items."""
        fields: ConversationItems = decode_body(_items, call.body)
        tenant = call.principal.tenant
        items = await self._checked(fields.items, tenant)
        await self._stores.conversations.add(tenant, id_, items)
        page = {"first_id": items[0]["id"], "last_id": items[-1]["id"], "has_more": False}
        await answer(call, {"object": "list", "data": items, **page})

    async def get_item(self, call: Call, id_: str, item_id: str) -> None:
        """GET /v1/conversations/{id}/items/{item}."""
        for item in await self._items_of(call, id_):
            if item["id"] == item_id:
                await answer(call, item)
                return
        raise no_item(item_id)

    async def delete_item(self, call: Call, id_: str, item_id: str) -> None:
        """DELETE /v1/conversations/{id}/items/{item}."""
        head = await self._stores.conversations.delete_item(call.principal.tenant, id_, item_id)
        await answer(call, _shown(head))

    async def _items_of(self, call: Call, id_: str) -> tuple[Item, ...]:
        stores, tenant = self._stores, call.principal.tenant
        return await stores.conversations.items(tenant, await stores.conversations.get(tenant, id_))

    async def _checked(self, items: list[Item], tenant: str) -> tuple[Item, ...]:
        for index, item in enumerate(items):
            if not is_hosted(item):
                read_item(item, f"items[{index}]")
        return listed(await resolve_references(items, tenant, self._stores), self._ids())


def _shown(head: ConversationHead) -> dict[str, Any]:
    return {
        "id": head.id,
        "object": "conversation",
        "created_at": head.created_s,
        "metadata": head.metadata,
    }
