"""The HTTP endpoints under `/v1/responses` and `/v1/conversations`."""

import re
from collections.abc import Awaitable, Callable
from typing import Any, Final
from urllib.parse import parse_qs

import msgspec

from headwater.actors.edge.answer.run import Generator
from headwater.actors.edge.apis.responses_creation import (
    ResponseCreator,
    Stores,
    compacted,
    compaction_request,
    resolve_references,
    storage_off,
)
from headwater.actors.edge.apis.responses_encoder import ResponsesEncoder, new_resource
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
from headwater.actors.edge.saga.http_call import Call, Serving
from headwater.actors.edge.settings import HistorySettings
from headwater.actors.http.asgi import Headers, respond
from headwater.actors.http.body import decode_body
from headwater.actors.http.errors import ApiError, bad_request, method_not_allowed, page_of, page_request

_create: Final = msgspec.json.Decoder(CreateFields)
_count: Final = msgspec.json.Decoder(InputFields)
_compact: Final = msgspec.json.Decoder(CompactFields)


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
        fields: CreateFields = decode_body(_create, call.body)
        stream = bool(fields.stream)
        creation = await self._creator.begin(fields, call, stream=stream)

        async def save(result: GenerationResult) -> None:
            await self._creator.save(creation, result)

        await self._generator.run(creation.request, creation.encoder, call, before_end=save)

    async def count_tokens(self, call: Call) -> None:
        """POST /v1/responses/input_tokens."""
        fields: InputFields = decode_body(_count, call.body)
        if not (fields.input or fields.previous_response_id or fields.conversation_id):
            raise missing("input")
        model = self._serving.model(fields.model, call.principal)
        call.quota.enter(model.card.name)
        history, items = await self._creator.read_history(fields, call.principal.tenant)
        context = call.quota.context(model.card.name, model.card.context_length)
        request = count_request(fields, history.items, items)
        count = await self._creator.count(
            request, model, context, self._serving.intake_of(call.headers, call.principal)
        )
        await answer(call, {"object": "response.input_tokens", "input_tokens": count})

    async def compact(self, call: Call) -> None:
        """POST /v1/responses/compact."""
        fields: CompactFields = decode_body(_compact, call.body)
        if not (fields.input or fields.previous_response_id):
            raise missing("input")
        model = self._serving.model(fields.model, call.principal)
        prompt = InputFields(
            model=fields.model, input=fields.input, previous_response_id=fields.previous_response_id
        )
        history, items = await self._creator.read_history(prompt, call.principal.tenant)
        id_ = self._serving.workers.ports.ids()
        context = call.quota.context(model.card.name, model.card.context_length)
        request = compaction_request(fields, items, history.items, id_, context)
        resource = new_resource(CreateFields(model=fields.model), id_, [], {}, stored=False)
        encoder = ResponsesEncoder(resource, model.tokenizer, self._creator.now_s)
        sink = _NoSink()
        result = await self._generator.run(request, encoder, call, sink)
        if result is not None:
            await answer(call, compacted([*history.items, *items], result), sink.headers)

    async def get(self, call: Call, query: bytes, id_: str) -> None:
        """GET /v1/responses/{id}."""
        response = await self._stored(call, id_)
        if parse_qs(query.decode("latin-1")).get("stream", ["false"])[0] == "true":
            raise bad_request(
                "Only responses created with background: true can be streamed again.", param="stream"
            )
        await answer(call, response.resource)

    async def delete(self, call: Call, id_: str) -> None:
        """DELETE /v1/responses/{id}."""
        if self._stores is None or not await self._stores.responses.delete(call.principal.tenant, id_):
            raise no_response(id_)
        await answer(call, {"id": id_, "object": "response.deleted", "deleted": True})

    async def cancel(self, call: Call, id_: str) -> None:
        """POST /v1/responses/{id}/cancel."""
        await self._stored(call, id_)
        raise bad_request(
            "Only responses created with background: true can be cancelled; close the connection instead.",
            param="response_id",
        )

    async def input_items(self, call: Call, query: bytes, id_: str) -> None:
        """GET /v1/responses/{id}/input_items."""
        page = page_request(query)
        response = await self._stored(call, id_)
        await answer(call, page_of(response.input, page))

    async def _stored(self, call: Call, id_: str) -> StoredResponse:
        if self._stores is not None:
            found = await self._stores.responses.get(call.principal.tenant, id_)
            if found is not None:
                return found
        raise no_response(id_)


class _NoSink:
    """Takes an answer that becomes part of another document. See `ByteSink`."""

    cut = False

    def __init__(self) -> None:
        self.headers: Headers = []

    async def start(self, headers: Headers) -> None:
        """See `ByteSink.start`."""
        raise AssertionError("nothing is streamed")

    def write(self, data: bytes, *, last: bool = False) -> None:
        """See `ByteSink.write`."""
        raise AssertionError("nothing is streamed")

    async def settle(self) -> None:
        """See `ByteSink.settle`."""

    async def respond(self, body: bytes, headers: Headers) -> None:
        """See `ByteSink.respond`."""
        del body
        self.headers = headers


async def answer(call: Call, document: Any, headers: Headers | None = None) -> None:
    """A whole JSON response."""
    await respond(call.send, 200, msgspec.json.encode(document), headers or [])


def no_response(id_: str) -> ApiError:
    """404 for an unknown response."""
    return ApiError(404, f"Response with id '{id_[:128]}' not found.", param="response_id", code="not_found")


# The endpoints under `/v1/conversations`.

_create_conversation: Final = msgspec.json.Decoder(ConversationFields)
_update: Final = msgspec.json.Decoder(ConversationUpdate)
_items: Final = msgspec.json.Decoder(ConversationItems)


class ConversationsApi:
    """The endpoints under `/v1/conversations`."""

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
        fields: ConversationFields = decode_body(_create_conversation, call.body or b"{}")
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


# The paths of both.

PREFIXES: Final = ("/v1/responses", "/v1/conversations")

_ID: Final = "([A-Za-z0-9_-]{1,128})"
Endpoint = Callable[[Call, tuple[str, ...], bytes], Awaitable[None]]
"""Answers a call, given the ids in its path and its query string."""


class ResponsesRoutes:
    """The endpoints of one edge."""

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
        routes: dict[str, dict[str, Endpoint]] = {
            "/v1/responses": {"POST": lambda call, _, __: responses.create(call)},
            "/v1/responses/input_tokens": {"POST": lambda call, _, __: responses.count_tokens(call)},
            "/v1/responses/compact": {"POST": lambda call, _, __: responses.compact(call)},
            "/v1/responses/{id}": {
                "GET": lambda call, ids, query: responses.get(call, query, *ids),
                "DELETE": lambda call, ids, _: responses.delete(call, *ids),
            },
            "/v1/responses/{id}/cancel": {"POST": lambda call, ids, _: responses.cancel(call, *ids)},
            "/v1/responses/{id}/input_items": {
                "GET": lambda call, ids, query: responses.input_items(call, query, *ids)
            },
            "/v1/conversations": {"POST": lambda call, _, __: conversations.create(call)},
            "/v1/conversations/{id}": {
                "GET": lambda call, ids, _: conversations.get(call, *ids),
                "POST": lambda call, ids, _: conversations.update(call, *ids),
                "DELETE": lambda call, ids, _: conversations.delete(call, *ids),
            },
            "/v1/conversations/{id}/items": {
                "GET": lambda call, ids, query: conversations.list_items(call, query, *ids),
                "POST": lambda call, ids, _: conversations.add_items(call, *ids),
            },
            "/v1/conversations/{id}/items/{id}": {
                "GET": lambda call, ids, _: conversations.get_item(call, *ids),
                "DELETE": lambda call, ids, _: conversations.delete_item(call, *ids),
            },
        }
        self._patterns = [
            (re.compile(path.replace("{id}", _ID)), methods) for path, methods in routes.items()
        ]

    def find(self, method: str, path: str, query: bytes) -> Callable[[Call], Awaitable[None]]:
        """The endpoint of a path, with the ids in it and its query string. Raises `ApiError` 404 and 405."""
        for pattern, methods in self._patterns:
            match = pattern.fullmatch(path)
            if match is None:
                continue
            if method not in methods:
                raise method_not_allowed(*methods)
            endpoint, ids = methods[method], match.groups()
            return lambda call: endpoint(call, ids, query)
        raise ApiError(404, f"Unknown route: {method} {path[:200]}.", code="not_found")
