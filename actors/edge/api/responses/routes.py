"""Paths of the Responses API to its endpoints."""

import re
from collections.abc import Awaitable, Callable
from typing import Final

from headwater.actors.edge.api.responses.conversations import ConversationsApi
from headwater.actors.edge.api.responses.creation import ResponseCreator
from headwater.actors.edge.api.responses.endpoints import ResponsesApi
from headwater.actors.edge.api.responses.load_history import Stores
from headwater.actors.edge.api.responses.socket import ResponsesSocket
from headwater.actors.edge.generation.generate import Generator
from headwater.actors.edge.history.conversations import ConversationStore
from headwater.actors.edge.history.objects import TenantObjects
from headwater.actors.edge.history.responses import ResponseStore
from headwater.actors.edge.history.settings import HistorySettings
from headwater.actors.edge.request.context import Call, Serving
from headwater.actors.http.errors import ApiError, method_not_allowed

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
