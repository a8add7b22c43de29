"""The preparation of a request for a model: everything that is known before a worker is asked for.

Only the language of a recording is asked of a worker before its pieces are transcribed (`LanguageChoice`): one more choice of the request, of one
token, on any worker.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

from headwater.actors.edge.admit.control import NO_SALT, CacheSalt
from headwater.actors.edge.catalog import Model, endpoint_of
from headwater.actors.edge.prompt.guides import processors_of
from headwater.actors.edge.prompt.media import NO_MEDIA, LoadedMedia, load_media, with_texts_of_files
from headwater.actors.edge.prompt.prompts import (
    AnswerFormat,
    answer_format,
    chat_prompt,
    of_tenant,
    text_prompts,
    too_long,
    truncated,
)
from headwater.actors.edge.prompt.request import (
    AudioPlace,
    AudioRecording,
    GenerationRequest,
    MediaPart,
    PromptDetail,
    SamplingFields,
)
from headwater.actors.edge.prompt.speech import (
    AudioChunk,
    LanguageDetection,
    detection_of,
    load_chunks,
    require_speech,
    speech_prompt,
    with_language,
)
from headwater.actors.edge.saga.driver import ChoiceDriver, ChoiceMessages
from headwater.actors.edge.saga.placement import Dispatcher
from headwater.actors.edge.saga.record import RequestLogWriter
from headwater.actors.edge.saga.types import ChoiceSpec
from headwater.actors.http.errors import ApiError, bad_field, bad_request
from headwater.actors.media.intake import MediaFetcher
from headwater.actors.media.item import MediaItem
from headwater.schemas.hashing import U32
from headwater.schemas.inference import Guide, Sampling, TokenLogprob
from headwater.schemas.media import PromptMedia, media_features
from headwater.schemas.routing import Constraints
from headwater.schemas.tables import Capability, ModelCard, needs_of, required_capabilities

REPETITION_PENALTY_MAX: Final = 10.0
"""Engines take any positive number, but a value far from 1 destroys the distribution."""

PROMPT_LOGPROBS_MAX: Final = 32_768
"""Log probabilities of one prompt: they travel in one message."""

NO_DEFAULTS: Final[Mapping[str, float]] = {}


def sampling_for(
    request: GenerationRequest,
    model: Model,
    context: int,
    longest: int,
    guide: Guide | None,
    guide_param: str,
) -> Sampling:
    """Return how the engine samples for a request whose longest prompt has `longest` tokens of this context. Raises `ApiError` 400."""
    card, fields = model.card, request.sampling
    if longest >= context:
        has = f"{longest} tokens in the prompt and {request.max_tokens or 1} in the completion"
        raise too_long(model, context, has, request.param, tokens=longest)
    # What a client asks for at most is no more than what fits: agents ask for 32,000 whatever the model.
    limit = min(request.max_tokens, context - longest) if request.max_tokens else request.max_tokens
    if limit is None:
        limit = min(context - longest, int(card.default_sampling.get("max_tokens", context)))
    sampling = sampling_of(
        fields,
        # An engine generates at least one token, also for a client that wants none.
        limit=max(1, limit),
        guide=guide,
        processors=(
            processors_of(fields.processors, card.logits_processors)
            if fields.processors is not None
            else None
        ),
        defaults=card.default_sampling,
    )
    sampling = _with_budget(_with_logprobs(sampling, request, card), request, model)
    # An engine without cache salts would share the prompt's blocks with other clients.
    for need in needs_of(sampling, cache_salt=request.hints.cache_salt):
        require(card, need.capability, guide_param if need.capability == "guide" else need.param)
    if fields.logprobs is not None and fields.logprobs > card.logprobs_max:
        param = request.logprobs_param
        raise bad_field(param, f"must be from 0 to {card.logprobs_max} for this model.")
    _check_prompt_logprobs(sampling, longest, card)
    vocabulary = card.vocabulary or model.tokenizer.vocabulary
    for param in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
        outside = next((token for token in getattr(sampling, param) if token >= vocabulary), None)
        if outside is not None:
            raise bad_request(
                f"{param}: token id {outside} is outside the vocabulary of {vocabulary}.", param=param
            )
    return sampling


def _with_logprobs(sampling: Sampling, request: GenerationRequest, card: ModelCard) -> Sampling:
    """Return the parameters with the log probabilities that other features need: best_of those of the answer, echo those of the prompt."""
    if request.best_of > request.choices and sampling.logprobs is None:
        require(card, "logprobs", "best_of")
        sampling = msgspec.structs.replace(sampling, logprobs=0)
    if request.echo and request.sampling.logprobs is not None and sampling.prompt_logprobs is None:
        require(card, "prompt_logprobs", "echo")
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=request.sampling.logprobs)
    return sampling


def _with_budget(sampling: Sampling, request: GenerationRequest, model: Model) -> Sampling:
    """Return the parameters with the budget for reasoning, if the engine enforces one. Else the template gets it, or it is a hint without effect."""
    reasoning = request.reasoning
    if reasoning.budget is None:
        return sampling
    if "thinking_budget" in model.card.capabilities:
        return msgspec.structs.replace(sampling, thinking_budget=reasoning.budget)
    by_template = model.template is not None and model.template.mentions("thinking_budget")
    if reasoning.budget_param and not by_template:
        require(model.card, "thinking_budget", reasoning.budget_param)
    return sampling


def _check_prompt_logprobs(sampling: Sampling, longest: int, card: ModelCard) -> None:
    count = sampling.prompt_logprobs
    if count is None:
        return
    if count > card.logprobs_max:
        raise bad_field("prompt_logprobs", f"must be from 0 to {card.logprobs_max} for this model.")
    if longest * (count + 1) > PROMPT_LOGPROBS_MAX:
        raise bad_request(
            f"The prompt has {longest} tokens; with {count} alternatives each that is more than"
            f" {PROMPT_LOGPROBS_MAX} log probabilities.",
            param="prompt_logprobs",
        )


def sampling_of(
    fields: SamplingFields,
    *,
    limit: int,
    guide: Guide | None = None,
    processors: dict[str, dict[str, Any]] | None = None,
    defaults: Mapping[str, float] = NO_DEFAULTS,
) -> Sampling:
    """Return how the engine samples. `limit` is the number of tokens that may be generated.

    `defaults` are the model's own values of fields that the request leaves out. Raises `ApiError` 400.
    """

    def chosen(name: str, otherwise: float) -> float:
        value: float | None = getattr(fields, name)
        return float(defaults.get(name, otherwise)) if value is None else value

    if fields.top_p == 0:
        raise bad_field("top_p", "must be above 0: temperature 0 always selects the most likely token.")
    penalty = fields.repetition_penalty
    if penalty is not None and not 0 < penalty <= REPETITION_PENALTY_MAX:
        raise bad_field("repetition_penalty", f"must be above 0 and at most {REPETITION_PENALTY_MAX:g}.")
    if fields.min_tokens is not None and fields.min_tokens > limit:
        raise bad_field("min_tokens", f"must be from 0 to {limit}.")
    return Sampling(
        max_tokens=limit,
        temperature=chosen("temperature", 1.0),
        top_p=chosen("top_p", 1.0),
        top_k=max(0, int(chosen("top_k", 0))),
        min_p=chosen("min_p", 0.0),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        repetition_penalty=chosen("repetition_penalty", 1.0),
        seed=fields.seed,
        min_tokens=fields.min_tokens or 0,
        ignore_eos=fields.ignore_eos,
        stop_token_ids=fields.stop_token_ids,
        logprobs=fields.logprobs,
        logit_bias=fields.logit_bias,
        guide=guide,
        processors=processors or {},
        prompt_logprobs=fields.prompt_logprobs,
        allowed_token_ids=fields.allowed_token_ids,
        bad_words=fields.bad_words,
    )


def require(card: ModelCard, capability: Capability, param: str) -> None:
    """Raises `ApiError` 400 naming the field and the capability that the engine lacks."""
    if capability not in card.capabilities:
        raise bad_field(
            param,
            f"is not supported for {card.name}: its engine, {card.engine}, lacks capability {capability!r}.",
        )


def with_seed(sampling: Sampling, number: int) -> Sampling:
    """The sampling of one choice: seeds count up from the client's, and wrap around after the greatest."""
    if sampling.seed is None:
        return sampling
    seed = (sampling.seed + number + 2**63) % 2**64 - 2**63
    return msgspec.structs.replace(sampling, seed=seed)


# The prepared request.

CHOICES_MAX: Final = 128
"""Choices of one request, over all its prompts."""


class Prepared(NamedTuple):
    """A request whose prompts are token ids and whose sampling is what engines get."""

    request: GenerationRequest
    model: Model
    prompts: list[U32]
    sampling: Sampling
    format: AnswerFormat
    salt: CacheSalt = NO_SALT
    loaded: LoadedMedia = NO_MEDIA
    media: tuple[PromptMedia, ...] = ()
    """The positions of the loaded media in the prompt; a request with media has at least one."""
    chunks: tuple[AudioChunk, ...] = ()
    """The recording that is transcribed, in pieces: one for each prompt."""
    detection: LanguageDetection | None = None
    """How to detect the spoken language; None if it is known."""
    language: str = ""
    """What was detected."""
    media_s: float = 0.0
    """How long it took to fetch and decode the media."""

    def media_of(self, place: int) -> tuple[PromptMedia, ...]:
        """The media of the prompt at this place."""
        return (self.chunks[place].media(len(self.prompts[place])),) if self.chunks else self.media

    def spoken_in(self, language: str) -> "Prepared":
        """The same, with the language that was detected."""
        assert self.detection is not None
        token = self.detection.languages[language]
        return self._replace(
            prompts=[with_language(prompt, token) for prompt in self.prompts], language=language
        )

    @property
    def places(self) -> tuple[AudioPlace, ...]:
        """The positions of the pieces in the recording."""
        return tuple([AudioPlace(chunk.begin_s, chunk.seconds) for chunk in self.chunks])

    @property
    def held(self) -> list[tuple[str, memoryview]]:
        """Id and data of all media: what workers may fetch."""
        loaded = zip(self.media, self.loaded.items, strict=True)
        return [(place.id, item.data) for place, item in loaded] + [
            (chunk.id, chunk.data) for chunk in self.chunks
        ]

    @property
    def per_prompt(self) -> int:
        """Choices that are generated for each prompt."""
        return max(self.request.choices, self.request.best_of)

    @property
    def shows_prompt(self) -> bool:
        """True if the client asked for the prompt, or for its tokens or log probabilities."""
        request = self.request
        return request.echo or request.return_token_ids or self.sampling.prompt_logprobs is not None

    def prompt_detail(self, index: int, logprobs: tuple[TokenLogprob | None, ...]) -> PromptDetail:
        """Return what the client asked to see of prompt `index`."""
        request = self.request
        tokens = tuple(self.prompts[index].tolist())
        text = ""
        if request.echo:
            prompt = request.prompts[index]
            decode = self.model.tokenizer.reference.decode
            text = prompt if isinstance(prompt, str) else decode(list(tokens), skip_special_tokens=False)
        return PromptDetail(text, tokens, logprobs)

    @property
    def prompt_tokens(self) -> int:
        """Tokens over all prompts."""
        return sum(map(len, self.prompts))

    @property
    def audio_tokens(self) -> int:
        """The number of prompt tokens that stand for audio."""
        return sum([item.tokens for item in self.media if item.kind == "audio"]) if self.media else 0


async def prepare(
    request: GenerationRequest,
    model: Model,
    context: int,
    salt: CacheSalt = NO_SALT,
    intake: MediaFetcher | None = None,
    *,
    special_tokens_in_text: bool = False,
) -> Prepared:
    """Check a request against its model, and encode its prompts. Raises `ApiError` 400.

    `context`: tokens that prompt and answer may have together, for this client. `intake` decodes media; None: there are none to be had.
    """
    if request.recording is not None:
        return await _transcription(request, request.recording, model, context, salt, intake)
    if "generate" not in model.card.capabilities:
        raise bad_request(
            f"{model.card.name} does not generate text; use {endpoint_of(model.card)}.", param="model"
        )
    if max(1, len(request.prompts)) * max(request.choices, request.best_of) > CHOICES_MAX:
        raise bad_request(f"At most {CHOICES_MAX} choices over all prompts.", param=request.param)
    read_as = answer_format(request, model.card, model.response_template)
    loaded = NO_MEDIA
    media_s = 0.0
    media: tuple[PromptMedia, ...] = ()
    if request.messages:
        if request.has_media:
            began_s = asyncio.get_running_loop().time()
            fetched: dict[MediaPart, MediaItem] = {}
            turns = await with_texts_of_files(request.messages, intake, fetched)
            request = msgspec.structs.replace(request, messages=turns)
            loaded = await load_media(request.messages, model, intake, fetched)
            media_s = asyncio.get_running_loop().time() - began_s
        chat = await chat_prompt(
            request, model, context, loaded, special_tokens_in_text=special_tokens_in_text
        )
        prompts, media = [chat.tokens], chat.media
        read_as = read_as.after(chat.text, guided=request.guide is not None)
    else:
        prompts = await text_prompts(request, model, context)
    if salt.value:
        media = of_tenant(media, salt.value)
    if media and request.prompt_options.truncate_tokens is not None:
        raise bad_request("A prompt with media cannot be truncated.", param="truncate_prompt_tokens")
    prompts = truncated(prompts, request, context)
    if not prompts or not all(map(len, prompts)):
        raise bad_request("The prompt has no tokens.", param=request.param)
    # A call that the client demands leaves no room for an answer in another form.
    guide = read_as.guide or request.guide
    guide_param = "tool_choice" if read_as.guide else request.guide_param
    longest = max(map(len, prompts))
    sampling = sampling_for(request, model, context, longest, guide, guide_param)
    return Prepared(*(request, model, prompts, sampling, read_as, salt, loaded, media), media_s=media_s)


async def _transcription(
    request: GenerationRequest,
    recording: AudioRecording,
    model: Model,
    context: int,
    salt: CacheSalt,
    intake: MediaFetcher | None,
) -> Prepared:
    """A recording: the same prompt for each piece of it."""
    support = require_speech(model)
    prompt = await speech_prompt(recording, model, support)
    sampling = sampling_for(request, model, context, len(prompt), None, "")
    began_s = asyncio.get_running_loop().time()
    chunks = await load_chunks(recording, support, intake, model.card.media_processor)
    media_s = asyncio.get_running_loop().time() - began_s
    if salt.value:
        chunks = tuple(
            [chunk._replace(id=of_tenant((chunk.media(0),), salt.value)[0].id) for chunk in chunks]
        )
    if len(chunks) > CHOICES_MAX:
        raise bad_request(
            f"The recording has {len(chunks)} pieces of up to {support.window_s:g} s; at most {CHOICES_MAX} fit into one "
            "request. Send it in parts.",
            param="file",
            code="media_too_long",
        )
    prompts = [prompt] * len(chunks)
    read_as = answer_format(request, model.card, model.response_template)
    unknown = bool(support.languages) and not recording.language
    detection = detection_of(support) if unknown else None
    return Prepared(
        *(request, model, prompts, sampling, read_as, salt),
        chunks=chunks,
        detection=detection,
        media_s=media_s,
    )


class LanguageChoice:
    """The choice, numbered after those of the `prepared` request. `driver` carries it out; this is its `ChoiceOutput`."""

    def __init__(
        self, request: str, prepared: Prepared, dispatcher: Dispatcher, record: RequestLogWriter
    ) -> None:
        detection = prepared.detection
        assert detection is not None
        self._detection = detection
        self._ended = asyncio.Event()
        card, sampling = prepared.model.card, detection.sampling
        media = (prepared.chunks[0].media(len(detection.prompt)),)
        needs = required_capabilities(sampling, **media_features(media))
        spec = ChoiceSpec(
            request,
            len(prepared.prompts) * prepared.per_prompt,
            sampling,
            Constraints(needs=needs),
            cache_salt=prepared.salt.value,
            tokenizer=card.tokenizer,
            migrations_max=card.migrations_max,
        )
        messages = ChoiceMessages(spec, detection.prompt, card.block_size, dispatcher, media)
        self.driver = ChoiceDriver(spec, messages, dispatcher.workers, record, self)

    async def language(self) -> str:
        """The code of the language. Raises `ApiError`. May be cancelled: then `driver` is the caller's to cancel."""
        await self.driver.place()
        await self._ended.wait()
        if self.driver.error is not None:
            raise self.driver.error
        code = self._detection.language_of(self.driver.emitted[0]) if self.driver.emitted else ""
        if not code:
            raise ApiError(
                502, "The engine detected no language; name it.", kind="server_error", param="language"
            )
        return code

    def write_tokens(self, index: int, tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]) -> None:
        """See `ChoiceOutput.write_tokens`: they are read at the end."""

    def write_end(self, index: int) -> None:
        """See `ChoiceOutput.write_end`."""
        self._ended.set()
