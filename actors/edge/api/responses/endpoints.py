"""The HTTP endpoints under `/v1/responses`."""

from typing import Any, Final
from urllib.parse import parse_qs

import msgspec

from headwater.actors.edge.api.responses.compaction import compacted, compaction_request
from headwater.actors.edge.api.responses.creation import ResponseCreator
from headwater.actors.edge.api.responses.encoder import ResponsesEncoder
from headwater.actors.edge.api.responses.load_history import Stores
from headwater.actors.edge.api.responses.resource import new_resource
from headwater.actors.edge.api.responses.translate import count_request
from headwater.actors.edge.api.responses.types import (
    CompactFields,
    CreateFields,
    InputFields,
    missing,
)
from headwater.actors.edge.generation.events import GenerationResult
from headwater.actors.edge.generation.generate import Generator
from headwater.actors.edge.history.responses import StoredResponse
from headwater.actors.edge.request.context import Call, Serving
from headwater.actors.http.asgi import Headers, respond
from headwater.actors.http.decoding import decode_body
from headwater.actors.http.errors import ApiError, bad_request
from headwater.actors.http.paging import page_of, page_request

_create: Final = msgspec.json.Decoder(CreateFields)
_count: Final = msgspec.json.Decoder(InputFields)
_compact: Final = msgspec.json.Decoder(CompactFields)


class ResponsesApi:
    """See the module. Without `stores` nothing is stored."""

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
