"""One response from its request to its place in the store, over HTTP or WebSocket."""

from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from headwater.actors.edge.api.responses.encoder import ResponsesEncoder
from headwater.actors.edge.api.responses.framing import Framing, server_sent
from headwater.actors.edge.api.responses.items.stored import listed, text_characters
from headwater.actors.edge.api.responses.items.tools import ToolSet
from headwater.actors.edge.api.responses.items.types import Item
from headwater.actors.edge.api.responses.load_history import (
    LocalResponses,
    RequestHistory,
    Stores,
    load_history,
    resolve_references,
)
from headwater.actors.edge.api.responses.resource import new_resource
from headwater.actors.edge.api.responses.translate import generation_request, keep_last
from headwater.actors.edge.api.responses.types import ENCRYPTED_REASONING, CreateFields, InputFields
from headwater.actors.edge.generation.events import GenerationResult
from headwater.actors.edge.generation.messages.files import with_texts_of_files
from headwater.actors.edge.generation.messages.load import load_media
from headwater.actors.edge.generation.messages.turn import MediaPart
from headwater.actors.edge.generation.prompts import chat_prompt
from headwater.actors.edge.generation.request import GenerationRequest
from headwater.actors.edge.history.conversations import check_room
from headwater.actors.edge.history.objects import OBJECT_BYTES_MAX
from headwater.actors.edge.history.responses import StoredResponse
from headwater.actors.edge.model.catalog import Model
from headwater.actors.edge.request.context import Call, Serving
from headwater.actors.http.errors import ApiError, bad_request
from headwater.actors.media.intake import MediaFetcher
from headwater.actors.media.item import MediaItem

ANSWER_BYTES: Final = 256 * 1024
"""Of a stored response, for its answer and for JSON's own characters."""

INPUT_CHARACTERS_MAX: Final = OBJECT_BYTES_MAX - ANSWER_BYTES
"""Of a request whose response is stored."""


class Creation(NamedTuple):
    """A response that is ready to be generated. `items`: its input as it is stored."""

    request: GenerationRequest
    encoder: ResponsesEncoder
    items: tuple[Item, ...]
    history: RequestHistory
    tenant: str


class ResponseCreator:
    """One per edge. Without `stores` nothing is stored."""

    def __init__(self, serving: Serving, stores: Stores | None) -> None:
        self._serving = serving
        self._stores = stores
        clock = serving.workers.ports.clock
        self.now_s: Callable[[], int] = lambda: clock.wall_ns() // 1_000_000_000

    async def begin(
        self,
        fields: CreateFields,
        call: Call,
        *,
        stream: bool,
        framing: Framing = server_sent,
        local: LocalResponses | None = None,
    ) -> Creation:
        """Check a request and read its history. Raises `ApiError`; nothing is sent before."""
        serving = self._serving
        serving.fields.count(fields)
        fields.check()
        model = serving.model(fields.model, call.principal)
        tenant = call.principal.tenant
        history, items = await self.read_history(fields, tenant, local)
        id_ = serving.workers.ports.ids()
        request, tools = generation_request(fields, history.items, items, id_, stream=stream)
        if fields.truncation == "auto":
            context = call.quota.context(model.card.name, model.card.context_length)
            room = context - (fields.max_output_tokens or 1)
            request = await self._truncate(
                request, model, room, serving.intake_of(call.headers, call.principal)
            )
        full = listed(items, id_)
        if history.conversation is not None:
            check_room(history.conversation, len(items) + 1)
        stored = self._is_stored(fields, text_characters((full, fields.instructions, tools.echo)))
        encoder = self._encoder(fields, model, id_, tools, framing, stored=stored)
        return Creation(request, encoder, full, history, tenant)

    def _is_stored(self, fields: CreateFields, characters: int) -> bool:
        """Whether a response whose request has so many characters is stored.

        Raises `ApiError` 400 if it is too large, and the client asked for `store` or named a conversation: rather than a chain that breaks
        at its next request. By default `store` is true for all, and a client that never continues needs no store.
        """
        wanted = self._stores is not None and fields.store is not False
        if self._stores is None or characters <= INPUT_CHARACTERS_MAX:
            return wanted
        if fields.store or fields.conversation_id:
            param = "conversation" if fields.conversation_id else "store"
            raise bad_request(
                f"The request has {characters} characters, and one that is stored at most {INPUT_CHARACTERS_MAX}. Name large media by "
                f"their URLs, or send store: false{' and no conversation' if fields.conversation_id else ''}.",
                param=param,
                code="object_too_large",
            )
        return False

    async def read_history(
        self, fields: InputFields, tenant: str, local: LocalResponses | None = None
    ) -> tuple[RequestHistory, list[Item]]:
        """What comes before the input, and the input with its references resolved. Raises `ApiError`."""
        history = await load_history(fields, tenant, self._stores, local)
        return history, await resolve_references(fields.items(), tenant, self._stores)

    def _encoder(
        self,
        fields: CreateFields,
        model: Model,
        id_: str,
        tools: ToolSet,
        framing: Framing,
        *,
        stored: bool,
    ) -> ResponsesEncoder:
        resource = new_resource(
            fields,
            id_,
            tools.echo,
            model.card.default_sampling,
            stored=stored,
            created_s=self.now_s(),
        )
        return ResponsesEncoder(
            resource,
            model.tokenizer,
            self.now_s,
            framing=framing,
            custom=tools.custom,
            namespaces=tools.namespaces,
            encrypted_reasoning=fields.includes(ENCRYPTED_REASONING),
        )

    async def save(self, creation: Creation, result: GenerationResult | None) -> StoredResponse:
        """Store a whole response before its client learns of its end, so that any edge can continue it at once.

        `result` None: the response takes only its input. An answer that cannot be stored is not lost: the client
        gets it, with `store` false.
        """
        encoder = creation.encoder
        resource = encoder.complete(result) if result is not None else encoder.complete_empty()
        response = StoredResponse(
            id=resource["id"], earlier=creation.history.earlier, input=creation.items, resource=resource
        )
        stores, head = self._stores, creation.history.conversation
        try:
            if stores is not None and head is not None:
                items = [*creation.items, *resource["output"]]
                await stores.conversations.add(creation.tenant, head.id, items)
            if stores is not None and resource["store"]:
                await stores.responses.put(creation.tenant, response)
        except ApiError:
            # Logged and counted where it failed.
            resource["store"] = False
        return response

    async def count(
        self,
        request: GenerationRequest,
        model: Model,
        context: int,
        intake: MediaFetcher | None,
        known: dict[MediaPart, MediaItem] | None = None,
    ) -> int:
        """Tokens of a request's prompt; media in `known` are not fetched again. Raises `ApiError` 400 if they cannot fit into `context`."""
        special = self._serving.special_tokens_in_text
        found = {} if known is None else known
        turns = await with_texts_of_files(request.messages, intake, found)
        request = msgspec.structs.replace(request, messages=turns)
        loaded = await load_media(request.messages, model, intake, found)
        chat = await chat_prompt(request, model, context, loaded, special_tokens_in_text=special)
        return len(chat.tokens)

    async def _truncate(
        self, request: GenerationRequest, model: Model, room: int, intake: MediaFetcher | None
    ) -> GenerationRequest:
        """Without the oldest turns, as many as needed for `room` tokens. Logarithmically many counts are tried."""
        known: dict[MediaPart, MediaItem] = {}

        async def fits(candidate: GenerationRequest) -> bool:
            try:
                return await self.count(candidate, model, room, intake, known) <= room
            except ApiError as error:
                if error.code == "context_length_exceeded":
                    return False
                raise

        if await fits(request):
            return request
        enough, too_many = 1, len(request.messages)
        while enough + 1 < too_many:
            middle = (enough + too_many) // 2
            if await fits(keep_last(request, middle)):
                enough = middle
            else:
                too_many = middle
        return keep_last(request, enough)
