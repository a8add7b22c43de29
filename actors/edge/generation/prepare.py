"""A request and a model: everything that is known before a worker is asked for."""

from typing import Final, NamedTuple

import msgspec

from headwater.actors.edge.access.salts import NO_SALT, CacheSalt
from headwater.actors.edge.generation.answer_format import AnswerFormat, answer_format
from headwater.actors.edge.generation.events import AudioPlace, PromptDetail
from headwater.actors.edge.generation.messages.files import with_texts_of_files
from headwater.actors.edge.generation.messages.load import NO_MEDIA, LoadedMedia, load_media
from headwater.actors.edge.generation.messages.placeholders import of_tenant
from headwater.actors.edge.generation.messages.turn import MediaPart
from headwater.actors.edge.generation.prompts import chat_prompt, text_prompts, truncated
from headwater.actors.edge.generation.request import GenerationRequest
from headwater.actors.edge.generation.sampling import sampling_for
from headwater.actors.edge.generation.speech.chunks import AudioChunk, load_chunks
from headwater.actors.edge.generation.speech.detection import (
    LanguageDetection,
    detection_of,
    with_language,
)
from headwater.actors.edge.generation.speech.prompts import require_speech, speech_prompt
from headwater.actors.edge.generation.speech.recording import AudioRecording
from headwater.actors.edge.model.catalog import Model, endpoint_of
from headwater.actors.http.errors import bad_request
from headwater.actors.media.intake import MediaFetcher
from headwater.actors.media.item import MediaItem
from headwater.schemas.hashing import U32
from headwater.schemas.messages.inference import Sampling, TokenLogprob
from headwater.schemas.messages.media import PromptMedia

CHOICES_MAX: Final = 128
"""Choices of one request, over all its prompts."""


class Prepared(NamedTuple):
    """A request whose prompts are token ids and whose sampling is what engines get.

    `guide_param` is the field that asked for structured output.
    """

    request: GenerationRequest
    model: Model
    prompts: list[U32]
    sampling: Sampling
    format: AnswerFormat
    guide_param: str
    salt: CacheSalt = NO_SALT
    loaded: LoadedMedia = NO_MEDIA
    media: tuple[PromptMedia, ...] = ()
    """Where the loaded media are in the prompt; a request with media has one."""
    chunks: tuple[AudioChunk, ...] = ()
    """The recording that is transcribed, in pieces: one for each prompt."""
    detection: LanguageDetection | None = None
    """How the language that is spoken is to be detected; None if it is known."""
    language: str = ""
    """What was detected."""

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
        """Where the pieces of the recording are in it."""
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
        """Whether the client asked for the prompt, or for its tokens or log probabilities."""
        request = self.request
        return request.echo or request.return_token_ids or self.sampling.prompt_logprobs is not None

    def prompt_detail(self, index: int, logprobs: tuple[TokenLogprob | None, ...]) -> PromptDetail:
        """What the client asked to see of prompt `index`."""
        request = self.request
        tokens = tuple(self.prompts[index].tolist())
        text = ""
        if request.echo:
            given = request.prompts[index]
            decode = self.model.tokenizer.reference.decode
            text = given if isinstance(given, str) else decode(list(tokens), skip_special_tokens=False)
        return PromptDetail(text, tokens, logprobs)

    @property
    def prompt_tokens(self) -> int:
        """Tokens over all prompts."""
        return sum(map(len, self.prompts))

    @property
    def audio_tokens(self) -> int:
        """Those that stand for audio."""
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
    media: tuple[PromptMedia, ...] = ()
    if request.messages:
        if request.has_media:
            known: dict[MediaPart, MediaItem] = {}
            turns = await with_texts_of_files(request.messages, intake, known)
            request = msgspec.structs.replace(request, messages=turns)
            loaded = await load_media(request.messages, model, intake, known)
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
    return Prepared(request, model, prompts, sampling, read_as, guide_param, salt, loaded, media)


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
    chunks = await load_chunks(recording, support, intake, model.card.media_processor)
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
    return Prepared(request, model, prompts, sampling, read_as, "", salt, chunks=chunks, detection=detection)
