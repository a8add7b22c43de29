"""What is pooled: texts, token ids and conversations, as prompts of token ids with the media in them."""

import asyncio
from collections.abc import Sequence
from typing import Final, NamedTuple

from headwater.actors.edge.api.pooling_types import EmbeddingRequest
from headwater.actors.edge.generation.messages.files import FILES_MAX, with_texts_of_files
from headwater.actors.edge.generation.messages.load import (
    ITEMS_MAX,
    NO_MEDIA,
    TOO_MANY,
    load_media,
    media_parts,
)
from headwater.actors.edge.generation.messages.placeholders import expand_placeholders, of_tenant
from headwater.actors.edge.generation.messages.turn import MediaPart, Turn
from headwater.actors.edge.generation.prompts import chat_prompt, takes_media, tokens_of
from headwater.actors.edge.generation.request import GenerationRequest, PromptOptions
from headwater.actors.edge.model.catalog import Model
from headwater.actors.http.errors import bad_request
from headwater.actors.media.intake import MediaFetcher
from headwater.actors.media.item import MediaItem
from headwater.actors.media.request.errors import MediaCode
from headwater.schemas.hashing import U32
from headwater.schemas.media_kind import SEVERAL
from headwater.schemas.messages.media import PromptMedia

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
        prompts.append(without_places(await tokens_of(model, entry, param, special=special), model, param))
        if not len(prompts) % ENCODED_A_TURN:
            await asyncio.sleep(0)
    return prompts


def without_places(tokens: U32, model: Model, param: str) -> U32:
    """A prompt of text. Raises `ApiError` 400 for a token that stands for an item of media: engines end on one without an item."""
    if takes_media(model):
        expand_placeholders(tokens, NO_MEDIA, model, param)
    return tokens


async def conversation_prompts(
    request: EmbeddingRequest,
    model: Model,
    context: int,
    salt: str,
    intake: MediaFetcher | None,
    *,
    special_tokens_in_text: bool,
) -> PoolingPrompts:
    """Conversations as the model's chat template renders them, with their media. Raises `ApiError` 400 naming the part at fault.

    `context`: tokens that this client may use. `salt` keeps the media of tenants apart.
    """
    conversations = request.conversations()
    _check_counts(conversations)
    tokens: list[U32] = []
    media: list[tuple[PromptMedia, ...]] = []
    held: list[tuple[str, memoryview]] = []
    known: dict[MediaPart, MediaItem] = {}
    options = PromptOptions(
        add_special_tokens=request.add_special_tokens,
        add_generation_prompt=bool(request.add_generation_prompt),
        continue_final=bool(request.continue_final_message),
        variables=request.chat_template_kwargs or {},
    )
    for turns in conversations:
        with_texts = await with_texts_of_files(turns, intake, known)
        loaded = await load_media(with_texts, model, intake, known)
        chat = await chat_prompt(
            GenerationRequest(
                model=request.model, param="messages", messages=with_texts, prompt_options=options
            ),
            model,
            context,
            loaded,
            special_tokens_in_text=special_tokens_in_text,
        )
        tokens.append(chat.tokens)
        media.append(of_tenant(chat.media, salt) if salt else chat.media)
        held += [(place.id, item.data) for place, item in zip(media[-1], loaded.items, strict=True)]
    return PoolingPrompts(tokens, tuple(media), tuple(held))


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
        own = [part for part in parts if part.kind == kind]
        if len(own) > most:
            raise bad_request(
                f"{len(own)} {name}; a request may have at most {most}.", param=own[most].param, code=code
            )
