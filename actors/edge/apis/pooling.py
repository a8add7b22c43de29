"""POST /v1/embeddings, /v1/classify, /v1/score and /v1/rerank: wire types, prompts, vectors and responses.

The types are OpenAI's for embeddings, and vLLM's for score, rerank and classify.
"""

import asyncio
import base64
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar, cast

import msgspec
import numpy as np

from headwater.actors.edge.answer.jobs import Pooling, PoolingJob
from headwater.actors.edge.apis.chat import turns_of
from headwater.actors.edge.apis.chat_types import MESSAGES_MAX, ChatMessage, Priority, refuse_template
from headwater.actors.edge.catalog import Model, endpoint_of
from headwater.actors.edge.prompt.media import FILES_MAX, ITEMS_MAX, TOO_MANY, media_parts, refuse_too_many
from headwater.actors.edge.prompt.prompts import load_chat, of_tenant, refuse_places, tokens_of
from headwater.actors.edge.prompt.request import GenerationRequest, MediaPart, PromptOptions, Turn
from headwater.actors.edge.saga.fields import UnsupportedFields, rejected
from headwater.actors.edge.saga.http_call import (
    Call,
    RoutingHints,
    Serving,
    parse_routing_headers,
    request_headers,
)
from headwater.actors.edge.saga.record import RequestLogWriter
from headwater.actors.http.asgi import respond
from headwater.actors.http.body import decode_body
from headwater.actors.http.errors import ApiError, bad_field, bad_request
from headwater.actors.media.item import MediaItem
from headwater.actors.media.request import MediaCode
from headwater.schemas.hashing import U32
from headwater.schemas.media import SEVERAL, PromptMedia
from headwater.schemas.tables import ModelCard

INPUTS_MAX: Final = 2_048
TEXTS_MAX: Final = 2_048
CONVERSATIONS_MAX: Final = 128

Messages = Annotated[
    list[ChatMessage | list[ChatMessage]], msgspec.Meta(min_length=1, max_length=MESSAGES_MAX)
]
Dimensions = Annotated[int, msgspec.Meta(ge=1, le=16_384)]


class PoolingCommon(UnsupportedFields, kw_only=True):
    """Fields of all these endpoints."""

    model: str
    user: str | None = None
    priority: Priority | None = None
    add_special_tokens: bool | None = None
    normalize: Annotated[Any, rejected(True)] = None
    use_activation: Annotated[Any, rejected(True)] = None
    activation: Annotated[Any, rejected(True)] = None
    embed_dtype: Annotated[Any, rejected("float32")] = None
    endianness: Annotated[Any, rejected("native", "little")] = None
    truncate_prompt_tokens: Annotated[Any, rejected()] = None


Fields = TypeVar("Fields", bound=PoolingCommon)


class EmbeddingRequest(PoolingCommon, kw_only=True):
    """POST /v1/embeddings: of `input`, or of `messages`, a conversation or a list of those as vLLM takes them."""

    input: str | list[Any] | None = None
    messages: Messages | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Dimensions | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def inputs(self) -> list[str | list[int]]:
        """One entry per vector: a text, or token ids."""
        return entries(self.input or "", "input")

    def conversations(self) -> list[tuple[Turn, ...]]:
        """One conversation per vector. Raises `ApiError` 400 naming the message or part."""
        message_entries = self.messages or []
        single = [entry for entry in message_entries if isinstance(entry, ChatMessage)]
        if len(single) == len(message_entries):
            return [turns_of(single)]
        several = [entry for entry in message_entries if isinstance(entry, list) and entry]
        if len(several) < len(message_entries):
            raise bad_field("messages", "is a list of messages, or a list of such lists; none of them empty.")
        if len(several) > CONVERSATIONS_MAX:
            raise bad_field(
                "messages", f"has more than {CONVERSATIONS_MAX} conversations; send several requests."
            )
        return [turns_of(entry, f"messages[{number}]") for number, entry in enumerate(several)]

    def refuse_unsupported(self) -> None:
        """See `UnsupportedFields.refuse_unsupported`."""
        super().refuse_unsupported()
        if (self.input is None) == (self.messages is None):
            raise bad_request("Send one of input and messages.", param="input")
        if self.add_generation_prompt and self.continue_final_message:
            raise bad_field("continue_final_message", "and add_generation_prompt cannot both be true.")
        refuse_template(self.chat_template_kwargs)


class ClassifyRequest(PoolingCommon, kw_only=True):
    """POST /v1/classify."""

    input: str | list[Any]


class ScoreRequest(PoolingCommon, kw_only=True):
    """POST /v1/score: one text against one or several, or two lists of equal length."""

    text_1: str | list[str]
    text_2: str | list[str]

    def pairs(self) -> list[tuple[str, str]]:
        """The pairs to score."""
        first, second = _list(self.text_1, "text_1"), _list(self.text_2, "text_2")
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            raise bad_field(
                "text_1",
                f"has {len(first)} texts and text_2 {len(second)}; send one text, or lists of equal length.",
            )
        return list(zip(first, second, strict=True))


class RerankRequest(PoolingCommon, kw_only=True):
    """POST /v1/rerank, in the format of Jina and Cohere."""

    query: str
    documents: list[str | dict[str, Any]]
    top_n: Annotated[int, msgspec.Meta(ge=0)] | None = None
    return_documents: bool | None = None

    def texts(self) -> list[str]:
        """The documents' texts."""
        texts = [
            document if isinstance(document, str) else document.get("text") for document in self.documents
        ]
        if not all(isinstance(text, str) for text in texts):
            raise bad_field("documents", "must be strings, or objects with a text.")
        return _list(cast(list[str], texts), "documents")


def entries(value: str | list[Any], param: str) -> list[str | list[int]]:
    """A text, a list of texts, token ids or a list of those, as a list of texts or token ids."""
    inputs: list[Any] = []
    if isinstance(value, str) or (value and all(type(element) is int for element in value)):
        inputs = [value]
    elif all(isinstance(element, str) for element in value) or all(
        isinstance(element, list) and all(type(token) is int for token in element) for element in value
    ):
        inputs = list(value)
    if not inputs or not all(inputs):
        raise bad_field(
            param, "must be a string, a list of token ids, or a list of either; none of them empty."
        )
    if len(inputs) > INPUTS_MAX:
        raise bad_field(param, f"has more than {INPUTS_MAX} entries; send several requests.")
    return inputs


def floats(vector: bytes) -> list[float]:
    """A vector's numbers."""
    return cast(list[float], np.frombuffer(vector, "<f4").tolist())


def embedding_json(index: int, vector: bytes, form: str) -> bytes:
    """One entry of `data`. In base64 the vector is its bytes, little-endian float32."""
    shown: Any = base64.b64encode(vector).decode() if form == "base64" else floats(vector)
    return msgspec.json.encode({"object": "embedding", "index": index, "embedding": shown})


def _list(texts: str | list[str], param: str) -> list[str]:
    checked = [texts] if isinstance(texts, str) else texts
    if not checked or not all(checked):
        raise bad_field(param, "must be a string or a list of strings; none of them empty.")
    if len(checked) > TEXTS_MAX:
        raise bad_field(param, f"has more than {TEXTS_MAX} texts; send several requests.")
    return checked


ENCODED_A_TURN: Final = 16
"""Texts tokenized per turn of the event loop: the bound on how long streams wait."""


class PoolingPrompts(NamedTuple):
    """Prompts as token ids; for conversations the media of each, and id and data of what workers may fetch."""

    tokens: list[U32]
    media: tuple[tuple[PromptMedia, ...], ...] = ()
    held: tuple[tuple[str, memoryview], ...] = ()


async def text_prompts(
    model: Model, inputs: Sequence[str | list[int]], param: str, *, special: bool
) -> list[U32]:
    """Texts and lists of token ids as token ids. Raises `ApiError` 400 naming `param`.

    Short texts are tokenized on the event loop, which yields between batches of them.
    """
    prompts: list[U32] = []
    for entry in inputs:
        tokens = await tokens_of(model, entry, param, special=special)
        refuse_places(tokens, model, param)
        prompts.append(tokens)
        if not len(prompts) % ENCODED_A_TURN:
            await asyncio.sleep(0)
    return prompts


def _check_counts(conversations: Sequence[tuple[Turn, ...]]) -> None:
    """All conversations of a request have as much media as one chat may. Raises `ApiError` 400."""
    parts = [part for turns in conversations for part in media_parts(turns)]
    for part in parts:
        if part.kind == "embedding":
            raise bad_request(
                f"{part.param}: precomputed embeddings of images are not pooled; send the images.",
                param=part.param,
                code=MediaCode.EMBEDDINGS_OFF.value,
            )
    for kind, most, name, code in (
        *((kind, most, SEVERAL[kind], TOO_MANY[kind]) for kind, most in ITEMS_MAX.items()),
        ("file", FILES_MAX, "files", "too_many_files"),
    ):
        refuse_too_many([part for part in parts if part.kind == kind], most, name, code)


# The endpoints.

TOKENS_MAX: Final = 1_000_000
"""Prompt tokens of one request, over all of its inputs."""

WRITTEN_A_TURN: Final = 64
"""Vectors encoded as JSON per turn of the event loop: the bound on how long streams wait."""


class PoolingApi:
    """The endpoints that pool."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._pooling = Pooling(serving.workers)

    async def embeddings(self, call: Call) -> None:
        """POST /v1/embeddings."""
        request, model, hints = self._begin(EmbeddingRequest, call)
        task = _pooling_task(model.card, "embed")
        prompts = await self._prompts(request, model, call)
        name, param = self._name("embd"), "input" if request.messages is None else "messages"
        job = PoolingJob(
            name, model, prompts.tokens, task, request.dimensions or 0, hints=hints, media=prompts.media
        )
        vectors = await self._run("embeddings", job, call, param, prompts.held)
        form = request.encoding_format or "float"
        parts: list[bytes] = []
        for index, vector in enumerate(vectors):
            parts.append(embedding_json(index, vector, form))
            if index % WRITTEN_A_TURN == WRITTEN_A_TURN - 1:
                await asyncio.sleep(0)
        rest = msgspec.json.encode({"model": model.card.name, "usage": _usage(prompts.tokens)})
        body = b'{"object":"list","data":[' + b",".join(parts) + b"]," + rest[1:]
        await respond(call.send, 200, body, request_headers(name))

    async def classify(self, call: Call) -> None:
        """POST /v1/classify: the probability of each class; classes have the default names of Hugging Face."""
        request, model, hints = self._begin(ClassifyRequest, call)
        task = _pooling_task(model.card, "classify")
        special = request.add_special_tokens is not False
        prompts = await text_prompts(model, entries(request.input, "input"), "input", special=special)
        job = PoolingJob(self._name("classify"), model, prompts, task, hints=hints)
        data = []
        for index, vector in enumerate(await self._run("classify", job, call, "input")):
            shares = floats(vector)
            label = f"LABEL_{shares.index(max(shares))}"
            data.append({"index": index, "label": label, "probs": shares, "num_classes": len(shares)})
        await self._answer(call, job, {"object": "list", "data": data})

    async def score(self, call: Call) -> None:
        """POST /v1/score: the similarity of the texts of each pair."""
        request, model, hints = self._begin(ScoreRequest, call)
        job, scores = await self._scores("score", model, request.pairs(), call, hints)
        data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores)]
        await self._answer(call, job, {"object": "list", "data": data})

    async def rerank(self, call: Call) -> None:
        """POST /v1/rerank: the documents, best first."""
        request, model, hints = self._begin(RerankRequest, call)
        texts = request.texts()
        pairs = [(request.query, text) for text in texts]
        job, scores = await self._scores("rerank", model, pairs, call, hints)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        results: list[dict[str, Any]] = []
        for index in order[: request.top_n or len(order)]:
            result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
            if request.return_documents is not False:
                result["document"] = {"text": texts[index]}
            results.append(result)
        await self._answer(call, job, {"results": results})

    def _begin(self, kind: type[Fields], call: Call) -> tuple[Fields, Model, RoutingHints]:
        """The request, counted; the model that it names, and what it says about routing. Raises `ApiError` 400, 403, 404 and 429."""
        request = decode_body(kind, call.body)
        self._serving.fields.check(request)
        model = self._serving.model(request.model, call)
        call.quota.enter(model.card.name)
        limits = self._serving.settings.client
        hints = parse_routing_headers(
            call.headers, limits, call.principal, user=request.user, priority=request.priority
        )
        return request, model, hints

    async def _prompts(self, request: EmbeddingRequest, model: Model, call: Call) -> PoolingPrompts:
        """Return what a request for embeddings pools. Raises `ApiError` 400."""
        if request.messages is None:
            special = request.add_special_tokens is not False
            return PoolingPrompts(await text_prompts(model, request.inputs(), "input", special=special))
        return await self._conversations(request, model, call)

    async def _conversations(self, request: EmbeddingRequest, model: Model, call: Call) -> PoolingPrompts:
        """Conversations as the model's chat template renders them, with their media, which the salt keeps apart from those of other tenants."""
        conversations = request.conversations()
        _check_counts(conversations)
        serving = self._serving
        salt, intake = serving.salts.salt_of(call.principal, model.card).value, serving.intake_of(call)
        context, special = call.context(model), serving.settings.allow_special_tokens_in_text
        options = PromptOptions(
            add_special_tokens=request.add_special_tokens,
            add_generation_prompt=bool(request.add_generation_prompt),
            continue_final=bool(request.continue_final_message),
            variables=request.chat_template_kwargs or {},
        )
        tokens: list[U32] = []
        media: list[tuple[PromptMedia, ...]] = []
        held: list[tuple[str, memoryview]] = []
        known: dict[MediaPart, MediaItem] = {}
        for turns in conversations:
            prompt = GenerationRequest(
                model=request.model, param="messages", messages=turns, prompt_options=options
            )
            chat = await load_chat(prompt, model, context, intake, known, special_tokens_in_text=special)
            tokens.append(chat.tokens)
            media.append(of_tenant(chat.media, salt) if salt else chat.media)
            held += [(place.id, item.data) for place, item in zip(media[-1], chat.loaded.items, strict=True)]
        return PoolingPrompts(tokens, tuple(media), tuple(held))

    async def _scores(
        self, endpoint: str, model: Model, pairs: Sequence[tuple[str, str]], call: Call, hints: RoutingHints
    ) -> tuple[PoolingJob, list[float]]:
        """Scores by a cross-encoder, else by the cosine similarity of the two embeddings."""
        task = _pooling_task(model.card, "score", "embed")
        prompts: list[U32] = []
        if task == "score":
            segments: list[int] = []
            for first, second in pairs:
                prompt, segment = await model.tokenizer.encode_pair(first, second)
                refuse_places(prompt, model, "model")
                prompts.append(prompt)
                segments.append(segment)
            job = PoolingJob(self._name(endpoint), model, prompts, task, 0, tuple(segments), hints)
            vectors = await self._run(endpoint, job, call, "model")
            if any(len(vector) != 4 for vector in vectors):
                raise ApiError(
                    502, f"{model.card.name} returned several numbers for one pair.", kind="server_error"
                )
            return job, [floats(vector)[0] for vector in vectors]
        # Each text is embedded once, however many pairs contain it.
        places = {
            text: place for place, text in enumerate(dict.fromkeys(text for pair in pairs for text in pair))
        }
        prompts = await text_prompts(model, list(places), "model", special=True)
        job = PoolingJob(self._name(endpoint), model, prompts, task, hints=hints)
        vectors = await self._run(endpoint, job, call, "model")
        return job, [_cosine(vectors[places[first]], vectors[places[second]]) for first, second in pairs]

    async def _run(
        self,
        endpoint: str,
        job: PoolingJob,
        call: Call,
        param: str,
        held: Sequence[tuple[str, memoryview]] = (),
    ) -> list[bytes]:
        """Compute the vectors, unless the client disconnects. Workers can fetch the media that are `held`. Raises `ApiError`, `ClientGone`."""
        card = job.model.card
        _check(job, call.context(job.model), param)
        salt = self._serving.salts.salt_of(call.principal, card)
        job = job._replace(cache_salt=salt.value)
        self._serving.require_open()
        tokens = sum(len(prompt) for prompt in job.prompts)
        call.quota.reserve(tokens, 0)
        record = self._serving.record(job.request, job.model, endpoint, call)
        media = job.media[0] if job.media else ()
        record.accepted(tokens, len(job.prompts), call.body, media=media, flow=job.hints.flow)
        with self._serving.workers.media.hold(held):
            return await self._serving.compute(call, record, tokens, self._vectors(job, record))

    async def _vectors(self, job: PoolingJob, record: RequestLogWriter) -> list[bytes]:
        vectors = await self._pooling.vectors(job, record)
        if not all(np.isfinite(np.frombuffer(vector, "<f4")).all() for vector in vectors):
            raise ApiError(
                502, f"{job.model.card.name} returned a vector that is not finite.", kind="server_error"
            )
        return vectors

    async def _answer(self, call: Call, job: PoolingJob, document: dict[str, Any]) -> None:
        ports = self._serving.workers.ports
        head = {
            "id": job.request,
            "created": ports.clock.wall_ns() // 1_000_000_000,
            "model": job.model.card.name,
        }
        await call.answer({**head, **document, "usage": _usage(job.prompts)}, request_headers(job.request))

    def _name(self, prefix: str) -> str:
        return f"{prefix}-{self._serving.workers.ports.ids()}"


def _check(job: PoolingJob, context: int, param: str) -> None:
    """Raises `ApiError` 400 for inputs that are empty or too long; `context`: tokens that this client may use."""
    total = 0
    for prompt in job.prompts:
        total += len(prompt)
        if not len(prompt):
            raise bad_request("An input has no tokens.", param=param)
        if len(prompt) > context:
            raise bad_request(
                f"The context is {context} tokens; an input has {len(prompt)}.",
                param=param,
                code="context_length_exceeded",
            )
    if total > TOKENS_MAX:
        raise bad_request(
            f"The inputs have {total} tokens; at most {TOKENS_MAX} fit into one request. Send several.",
            param=param,
        )


def _cosine(first: bytes, second: bytes) -> float:
    vectors = [np.frombuffer(vector, "<f4").astype(float) for vector in (first, second)]
    size = float(np.linalg.norm(vectors[0]) * np.linalg.norm(vectors[1]))
    return float(vectors[0] @ vectors[1]) / size if size else 0.0


def _usage(prompts: Sequence[U32]) -> dict[str, int]:
    tokens = sum(len(prompt) for prompt in prompts)
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def _pooling_task(card: ModelCard, *tasks: str) -> str:
    """The first of these tasks that the model pools for. Raises `ApiError` 400."""
    offered = (card.pooling_tasks or ("embed",)) if "embed" in card.capabilities else ()
    for task in tasks:
        if task in offered:
            return task
    if not offered:
        raise bad_request(f"{card.name} does not pool; use {endpoint_of(card)}.", param="model")
    raise bad_request(
        f"{card.name} does not support this task: it pools for {', '.join(offered)}, not for {' or '.join(tasks)}.",
        param="model",
    )
