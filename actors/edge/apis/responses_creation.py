"""One response from its request to its place in the store, over HTTP or WebSocket; and the compaction of a conversation."""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec

from headwater.actors.edge.answer.choice import ResponseEncoder
from headwater.actors.edge.apis.responses_encoder import (
    Framing,
    ResponsesEncoder,
    new_resource,
    usage_document,
)
from headwater.actors.edge.apis.responses_items import Item, encode_opaque
from headwater.actors.edge.apis.responses_output import item_id, listed, owner_of, text_characters
from headwater.actors.edge.apis.responses_requests import (
    ENDPOINT,
    ID_PREFIX,
    conversation_of,
    generation_request,
    keep_last,
)
from headwater.actors.edge.apis.responses_types import (
    ENCRYPTED_REASONING,
    CompactFields,
    CreateFields,
    InputFields,
)
from headwater.actors.edge.catalog import Model
from headwater.actors.edge.history import (
    HISTORY_BYTES_MAX,
    OBJECT_BYTES_MAX,
    ConversationHead,
    ConversationStore,
    ResponseStore,
    StoredResponse,
    check_chain,
    check_room,
    not_found_before,
)
from headwater.actors.edge.prompt.prompts import load_chat
from headwater.actors.edge.prompt.request import (
    ChoiceEnd,
    GenerationRequest,
    GenerationResult,
    Hints,
    MediaPart,
    SamplingFields,
    TextPart,
    TokenDetail,
    Turn,
)
from headwater.actors.edge.saga.http_call import Call, Serving
from headwater.actors.http.asgi import server_sent
from headwater.actors.http.errors import ApiError, bad_request
from headwater.actors.media.intake import MediaFetcher
from headwater.actors.media.item import MediaItem

LOCAL_RESPONSES_MAX: Final = 32
REFERENCES_MAX: Final = 256


class Stores(NamedTuple):
    """The stores of an edge."""

    responses: ResponseStore
    conversations: ConversationStore


class RequestHistory(NamedTuple):
    """What comes before a request's input. `chain`: the responses that it continues, the oldest first."""

    items: tuple[Item, ...] = ()
    chain: tuple[StoredResponse, ...] = ()
    conversation: ConversationHead | None = None

    @property
    def earlier(self) -> tuple[str, ...]:
        """Ids of the chain."""
        return tuple(response.id for response in self.chain)


class LocalResponses:
    """The newest responses of one WebSocket connection, stored or not, each with all before it. Bounded."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[tuple[StoredResponse, ...], int]] = {}
        """Each with the size of its last response."""

    def add(self, chain: tuple[StoredResponse, ...]) -> None:
        """Keep the last response of a chain."""
        self._kept[chain[-1].id] = chain, len(msgspec.json.encode(chain[-1]))
        while (
            len(self._kept) > LOCAL_RESPONSES_MAX
            or sum(size for _, size in self._kept.values()) > HISTORY_BYTES_MAX
        ):
            self.discard(next(iter(self._kept)))

    def get(self, id_: str) -> tuple[StoredResponse, ...] | None:
        """A response's chain, None if it is not here (any more)."""
        return self._kept[id_][0] if id_ in self._kept else None

    def discard(self, id_: str) -> None:
        """Remove a response."""
        self._kept.pop(id_, None)


async def load_history(
    fields: InputFields, tenant: str, stores: Stores | None, local: LocalResponses | None = None
) -> RequestHistory:
    """Read what a request refers to. Raises `ApiError` 400, 404 or 503."""
    previous, conversation = fields.previous_response_id, fields.conversation_id
    if conversation:
        if stores is None:
            raise storage_off()
        head = await stores.conversations.get(tenant, conversation)
        return RequestHistory(await stores.conversations.items(tenant, head), conversation=head)
    if not previous:
        return RequestHistory()
    chain = local.get(previous) if local is not None else None
    if chain is None:
        if stores is None:
            # A client recovers from this one, by sending its conversation again.
            raise not_found_before(previous, ": this server stores no responses")
        chain = await stores.responses.chain(tenant, previous)
    check_chain(len(chain))
    return RequestHistory(tuple(item for response in chain for item in response.items()), chain)


async def resolve_references(items: Sequence[Item], tenant: str, stores: Stores | None) -> list[Item]:
    """The items with those in place that it names by id. Raises `ApiError` 400 for an unknown id."""
    references = [item for item in items if is_reference(item)]
    if not references:
        return list(items)
    if len(references) > REFERENCES_MAX:
        raise bad_request(f"At most {REFERENCES_MAX} item references.", param="input")
    by_id: dict[str, Item] = {}
    owners = dict.fromkeys(owner_of(str(item.get("id"))) for item in references)
    for owner in owners:
        response = await stores.responses.get(tenant, ID_PREFIX + owner) if stores and owner else None
        for item in response.items() if response is not None else ():
            by_id[item["id"]] = item
    resolved: list[Item] = []
    for index, item in enumerate(items):
        if not is_reference(item):
            resolved.append(item)
        elif item["id"] in by_id:
            resolved.append(by_id[item["id"]])
        else:
            raise bad_request(
                f"input[{index}]: no stored response has this item (any more); send the item itself.",
                param=f"input[{index}].id",
                code="item_not_found",
            )
    return resolved


def is_reference(item: Item) -> bool:
    """Return whether the item stands for an item of a stored response."""
    kind = item.get("type")
    return isinstance(item.get("id"), str) and (
        kind == "item_reference" or (kind is None and "role" not in item)
    )


def storage_off() -> ApiError:
    """400 for a request that needs the store."""
    return bad_request(
        "This server stores no responses and conversations (--responses store=false).",
        param="conversation",
        code="storage_disabled",
    )


# The creation of a response.

ANSWER_BYTES: Final = 256 * 1024
"""Bytes of a stored response that are reserved for its answer and for JSON's own characters."""

INPUT_CHARACTERS_MAX: Final = OBJECT_BYTES_MAX - ANSWER_BYTES
"""The longest request whose response is stored."""


class Creation(NamedTuple):
    """A response that is ready to be generated. `items`: its input as it is stored."""

    request: GenerationRequest
    encoder: ResponsesEncoder
    items: tuple[Item, ...]
    history: RequestHistory
    tenant: str


class ResponseCreator:
    """The creation of responses at one edge. Without `stores` nothing is stored."""

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
        model = serving.model(fields.model, call)
        tenant = call.principal.tenant
        history, items = await self.read_history(fields, tenant, local)
        id_ = serving.workers.ports.ids()
        request, tools = generation_request(fields, history.items, items, id_, stream=stream)
        if fields.truncation == "auto":
            context = call.context(model)
            room = context - (fields.max_output_tokens or 1)
            request = await self._truncate(request, model, room, serving.intake_of(call))
        full = listed(items, id_)
        if history.conversation is not None:
            check_room(history.conversation, len(items) + 1)
        stored = self._is_stored(fields, text_characters((full, fields.instructions, tools.echo)))
        defaults, created_s = model.card.default_sampling, self.now_s()
        encoder = ResponsesEncoder(
            new_resource(fields, id_, tools.echo, defaults, stored=stored, created_s=created_s),
            model.tokenizer,
            self.now_s,
            tools,
            framing=framing,
            encrypted_reasoning=fields.includes(ENCRYPTED_REASONING),
        )
        return Creation(request, encoder, full, history, tenant)

    def _is_stored(self, fields: CreateFields, characters: int) -> bool:
        """Return whether a response whose request has `characters` characters is stored.

        Raises `ApiError` 400 if it is too large, and the client asked for `store` or named a conversation: rather than a chain that breaks
        at its next request. By default `store` is true for all, and a client that never continues needs no store.
        """
        requested = self._stores is not None and fields.store is not False
        if self._stores is None or characters <= INPUT_CHARACTERS_MAX:
            return requested
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
        """Return what comes before the input, and the input with its references resolved. Raises `ApiError`."""
        history = await load_history(fields, tenant, self._stores, local)
        return history, await resolve_references(fields.items(), tenant, self._stores)

    async def save(self, creation: Creation, result: GenerationResult | None) -> StoredResponse:
        """Store a whole response before its client learns of its end, so that any edge can continue it at once.

        `result` None: the response takes only its input. An answer that cannot be stored is not lost: the client
        gets it, with `store` false.
        """
        encoder = creation.encoder
        resource = encoder.complete(result)
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
        fetched: dict[MediaPart, MediaItem] | None = None,
    ) -> int:
        """Tokens of a request's prompt; media in `fetched` are not fetched again. Raises `ApiError` 400 if they cannot fit into `context`."""
        special = self._serving.settings.allow_special_tokens_in_text
        chat = await load_chat(request, model, context, intake, fetched, special_tokens_in_text=special)
        return len(chat.tokens)

    async def _truncate(
        self, request: GenerationRequest, model: Model, room: int, intake: MediaFetcher | None
    ) -> GenerationRequest:
        """Return the request without its oldest turns, as many as needed for `room` tokens. Logarithmically many counts are tried."""
        fetched: dict[MediaPart, MediaItem] = {}

        async def fits(candidate: GenerationRequest) -> bool:
            try:
                return await self.count(candidate, model, room, intake, fetched) <= room
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


# POST /v1/responses/compact: the user's messages, and a summary that the model itself writes.

SUMMARY_TOKENS_MAX: Final = 2_048

INSTRUCTION: Final = (
    "Summarize the conversation above so that it can be continued from the summary alone. State the goals and "
    "constraints of the user, every decision and fact that was established, what was done with its results, and what "
    "remains open. Keep names, numbers, identifiers and code exactly. Answer with the summary only."
)


def compaction_request(
    fields: CompactFields, items: list[Item], history: tuple[Item, ...], id_: str, context: int
) -> GenerationRequest:
    """The internal request for the summary. `context`: tokens that the model takes. Raises `ApiError` 400."""
    turns = conversation_of(history, items, fields.instructions)
    return GenerationRequest(
        model=fields.model,
        param="input",
        endpoint=ENDPOINT,
        id_prefix=ID_PREFIX,
        id=id_,
        messages=(*turns, Turn(role="user", parts=(TextPart(INSTRUCTION),))),
        sampling=SamplingFields(temperature=0.0),
        max_tokens=min(SUMMARY_TOKENS_MAX, context // 4),
        max_tokens_param="input",
        hints=Hints(session=fields.prompt_cache_key),
    )


class CompactionEncoder(ResponseEncoder):
    """The response: all messages of users, then one item with the summary. `items` is the whole conversation. Nothing is streamed."""

    def __init__(self, items: list[Item]) -> None:
        self._items = items

    def text(self, index: int, text: str, detail: TokenDetail | None) -> bytes:
        """See `ResponseEncoder.text`."""
        raise AssertionError(text)

    def end_choice(self, index: int, end: ChoiceEnd) -> bytes:
        """See `ResponseEncoder.end_choice`."""
        raise AssertionError(end)

    def end(self, result: GenerationResult) -> bytes:
        """See `ResponseEncoder.end`."""
        raise AssertionError(result)

    def encode_result(self, result: GenerationResult) -> bytes:
        """See `ResponseEncoder.encode_result`."""
        id_ = result.start.id
        users = [
            item
            for item in self._items
            if item.get("role") == "user" and item.get("type", "message") == "message"
        ]
        summary = {
            "id": item_id("compaction", id_, 0),
            "type": "compaction",
            "encrypted_content": encode_opaque(result.choices[0].text),
        }
        return msgspec.json.encode(
            {
                "id": ID_PREFIX + id_,
                "object": "response.compaction",
                "created_at": result.start.created_s,
                "output": [*listed(users, id_), summary],
                "usage": usage_document(result.usage),
            }
        )
