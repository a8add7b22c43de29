"""The HTTP endpoints under `/v1/responses` and `/v1/conversations`."""

from collections.abc import Callable
from typing import Any, Final

import msgspec

from headwater.actors.edge.answer.run import Generator
from headwater.actors.edge.apis.responses_creation import (
    CompactionEncoder,
    ResponseCreator,
    Stores,
    compaction_request,
    resolve_references,
    storage_off,
)
from headwater.actors.edge.apis.responses_items import Item, is_hosted, read_item
from headwater.actors.edge.apis.responses_output import listed
from headwater.actors.edge.apis.responses_requests import count_request
from headwater.actors.edge.apis.responses_socket import ResponsesSocket
from headwater.actors.edge.apis.responses_types import (
    CompactFields,
    ConversationFields,
    ConversationItems,
    ConversationUpdate,
    CreateFields,
    InputFields,
    missing,
)
from headwater.actors.edge.history import (
    ConversationHead,
    ConversationStore,
    ResponseStore,
    StoredResponse,
    TenantObjects,
    no_item,
)
from headwater.actors.edge.prompt.request import GenerationResult
from headwater.actors.edge.saga.http_call import Call, Endpoint, Serving
from headwater.actors.edge.settings import HistorySettings
from headwater.actors.http.body import decode_body
from headwater.actors.http.errors import ApiError, bad_request, page_of, page_request


class ResponsesApi:
    """The endpoints under `/v1/responses`. Without `stores` nothing is stored."""

    def __init__(
        self, serving: Serving, generator: Generator, creator: ResponseCreator, stores: Stores | None
    ) -> None:
        self._serving = serving
        self._generator = generator
        self._creator = creator
        self._stores = stores

    async def create(self, call: Call) -> None:
        """POST /v1/responses."""
        fields = decode_body(CreateFields, call.body)
        stream = bool(fields.stream)
        creation = await self._creator.begin(fields, call, stream=stream)

        async def save(result: GenerationResult) -> None:
            await self._creator.save(creation, result)

        await self._generator.run(creation.request, creation.encoder, call, before_end=save)

    async def count_tokens(self, call: Call) -> None:
        """POST /v1/responses/input_tokens."""
        fields = decode_body(InputFields, call.body)
        if not (fields.input or fields.previous_response_id or fields.conversation_id):
            raise missing("input")
        model = self._serving.model(fields.model, call)
        call.quota.enter(model.card.name)
        history, items = await self._creator.read_history(fields, call.principal.tenant)
        context = call.context(model)
        request = count_request(fields, history.items, items)
        count = await self._creator.count(request, model, context, self._serving.intake_of(call))
        await call.answer({"object": "response.input_tokens", "input_tokens": count})

    async def compact(self, call: Call) -> None:
        """POST /v1/responses/compact."""
        fields = decode_body(CompactFields, call.body)
        if not (fields.input or fields.previous_response_id):
            raise missing("input")
        model = self._serving.model(fields.model, call)
        prompt = InputFields(
            model=fields.model, input=fields.input, previous_response_id=fields.previous_response_id
        )
        history, items = await self._creator.read_history(prompt, call.principal.tenant)
        id_ = self._serving.workers.ports.ids()
        context = call.context(model)
        request = compaction_request(fields, items, history.items, id_, context)
        encoder = CompactionEncoder([*history.items, *items])
        await self._generator.run(request, encoder, call)

    async def get(self, call: Call, id_: str) -> None:
        """GET /v1/responses/{id}."""
        response = await self._stored(call, id_)
        if call.asked.get("stream") == "true":
            raise bad_request(
                "Only responses created with background: true can be streamed again.", param="stream"
            )
        await call.answer(response.resource)

    async def delete(self, call: Call, id_: str) -> None:
        """DELETE /v1/responses/{id}."""
        if self._stores is None or not await self._stores.responses.delete(call.principal.tenant, id_):
            raise no_response(id_)
        await call.answer({"id": id_, "object": "response.deleted", "deleted": True})

    async def cancel(self, call: Call, id_: str) -> None:
        """POST /v1/responses/{id}/cancel."""
        await self._stored(call, id_)
        raise bad_request(
            "Only responses created with background: true can be cancelled; close the connection instead.",
            param="response_id",
        )

    async def input_items(self, call: Call, id_: str) -> None:
        """GET /v1/responses/{id}/input_items."""
        page = page_request(call.query)
        response = await self._stored(call, id_)
        await call.answer(page_of(response.input, page))

    async def _stored(self, call: Call, id_: str) -> StoredResponse:
        if self._stores is not None:
            stored = await self._stores.responses.get(call.principal.tenant, id_)
            if stored is not None:
                return stored
        raise no_response(id_)


def no_response(id_: str) -> ApiError:
    """404 for an unknown response."""
    return ApiError(404, f"Response with id '{id_[:128]}' not found.", param="response_id", code="not_found")


# The endpoints under `/v1/conversations`.


class ConversationsApi:
    """The endpoints under `/v1/conversations`."""

    def __init__(self, stores: Stores | None, ids: Callable[[], str], now_s: Callable[[], int]) -> None:
        self._stores_or_none = stores
        self._ids = ids
        self._now_s = now_s

    @property
    def _stores(self) -> Stores:
        if self._stores_or_none is None:
            raise storage_off()
        return self._stores_or_none

    async def create(self, call: Call) -> None:
        """POST /v1/conversations."""
        fields = decode_body(ConversationFields, call.body or b"{}")
        tenant = call.principal.tenant
        items = await self._checked(fields.items or [], tenant)
        head = ConversationHead(
            id=f"conv_{self._ids()}", created_s=self._now_s(), metadata=fields.metadata or {}
        )
        await self._stores.conversations.create(tenant, head)
        await self._stores.conversations.add(tenant, head.id, items)
        await call.answer(_shown(head))

    async def get(self, call: Call, id_: str) -> None:
        """GET /v1/conversations/{id}."""
        await call.answer(_shown(await self._stores.conversations.get(call.principal.tenant, id_)))

    async def update(self, call: Call, id_: str) -> None:
        """POST /v1/conversations/{id}."""
        fields = decode_body(ConversationUpdate, call.body)
        head = await self._stores.conversations.change(
            call.principal.tenant,
            id_,
            lambda head: msgspec.structs.replace(head, metadata=fields.metadata or {}),
        )
        await call.answer(_shown(head))

    async def delete(self, call: Call, id_: str) -> None:
        """DELETE /v1/conversations/{id}."""
        await self._stores.conversations.delete(call.principal.tenant, id_)
        await call.answer({"id": id_, "object": "conversation.deleted", "deleted": True})

    async def list_items(self, call: Call, id_: str) -> None:
        """GET /v1/conversations/{id}/items."""
        page = page_request(call.query)
        await call.answer(page_of(await self._items_of(call, id_), page))

    async def add_items(self, call: Call, id_: str) -> None:
        """POST /v1/conversations/{id}/items."""
        fields = decode_body(ConversationItems, call.body)
        tenant = call.principal.tenant
        items = await self._checked(fields.items, tenant)
        await self._stores.conversations.add(tenant, id_, items)
        page = {"first_id": items[0]["id"], "last_id": items[-1]["id"], "has_more": False}
        await call.answer({"object": "list", "data": items, **page})

    async def get_item(self, call: Call, id_: str, item_id: str) -> None:
        """GET /v1/conversations/{id}/items/{item}."""
        for item in await self._items_of(call, id_):
            if item["id"] == item_id:
                await call.answer(item)
                return
        raise no_item(item_id)

    async def delete_item(self, call: Call, id_: str, item_id: str) -> None:
        """DELETE /v1/conversations/{id}/items/{item}."""
        head = await self._stores.conversations.delete_item(call.principal.tenant, id_, item_id)
        await call.answer(_shown(head))

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


# The paths of both.

_ID: Final = "([A-Za-z0-9_-]{1,128})"


class ResponsesRoutes:
    """The endpoints of one edge: `paths` of HTTP, and the WebSocket."""

    def __init__(self, serving: Serving, generator: Generator, settings: HistorySettings) -> None:
        ports = serving.workers.ports
        self.objects = TenantObjects(ports.stored, settings.ttl_s, settings.tenant_bytes_max)
        stores = None
        if settings.store:
            stores = Stores(ResponseStore(self.objects), ConversationStore(self.objects, ports.ids))
        creator = ResponseCreator(serving, stores)
        responses = ResponsesApi(serving, generator, creator, stores)
        conversations = ConversationsApi(stores, ports.ids, creator.now_s)
        self.socket = ResponsesSocket(generator, creator, settings.connection_s)
        paths: dict[str, dict[str, Endpoint]] = {
            "/v1/responses": {"POST": responses.create},
            "/v1/responses/input_tokens": {"POST": responses.count_tokens},
            "/v1/responses/compact": {"POST": responses.compact},
            "/v1/responses/{id}": {"GET": responses.get, "DELETE": responses.delete},
            "/v1/responses/{id}/cancel": {"POST": responses.cancel},
            "/v1/responses/{id}/input_items": {"GET": responses.input_items},
            "/v1/conversations": {"POST": conversations.create},
            "/v1/conversations/{id}": {
                "GET": conversations.get,
                "POST": conversations.update,
                "DELETE": conversations.delete,
            },
            "/v1/conversations/{id}/items": {
                "GET": conversations.list_items,
                "POST": conversations.add_items,
            },
            "/v1/conversations/{id}/items/{id}": {
                "GET": conversations.get_item,
                "DELETE": conversations.delete_item,
            },
        }
        self.paths = {path.replace("{id}", _ID): methods for path, methods in paths.items()}
