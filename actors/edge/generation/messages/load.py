"""The media of a conversation: checked against what the model takes, and fetched and decoded by the media intake."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple, cast

from headwater.actors import metrics
from headwater.actors.edge.generation.messages.embeddings import form_of, image_shape
from headwater.actors.edge.generation.messages.turn import MediaPart, Turn
from headwater.actors.edge.model.catalog import Model
from headwater.actors.http.errors import ApiError, bad_request
from headwater.actors.media.intake import DEFAULT_TARGET, MediaFetcher
from headwater.actors.media.item import MediaItem
from headwater.actors.media.request.errors import MediaCode
from headwater.actors.media.request.settings import MediaLimits
from headwater.actors.media.request.source import MediaSource, MediaTarget
from headwater.schemas.media_kind import SEVERAL, PromptMediaKind
from headwater.schemas.tables.card import MediaSupport, ModelCard
from headwater.schemas.tables.media_tokens import count_media_tokens

ITEMS_MAX: Final[Mapping[PromptMediaKind, int]] = {"image": 16, "video": 4, "audio": 16}
"""Of one request, whatever the model takes."""


TOO_MANY: Final[Mapping[PromptMediaKind, str]] = {
    "image": "too_many_images",
    "video": "too_many_videos",
    "audio": "too_many_audio_clips",
}
TOO_MANY_TOKENS: Final[Mapping[PromptMediaKind, str]] = {
    "image": "image_tokens",
    "video": "video_tokens",
    "audio": "audio_tokens",
}
BAD_SHAPE: Final[Mapping[PromptMediaKind, str]] = {
    "image": "image_shape",
    "video": "video_shape",
    "audio": "audio_shape",
}
"""Codes of errors."""


class LoadedMedia(NamedTuple):
    """The decoded media of a conversation in its order, and the number of placeholder tokens of each."""

    items: tuple[MediaItem, ...] = ()
    tokens: tuple[int, ...] = ()


NO_MEDIA: Final = LoadedMedia()


def media_parts(turns: Iterable[Turn]) -> list[MediaPart]:
    """The media of a conversation, in order."""
    return [part for turn in turns for part in turn.parts if isinstance(part, MediaPart)]


async def load_media(
    turns: Sequence[Turn],
    model: Model,
    intake: MediaFetcher | None,
    known: dict[MediaPart, MediaItem] | None = None,
) -> LoadedMedia:
    """Fetch and decode the media of a conversation, at the same time. Raises `ApiError` 400 naming the part at fault.

    Those in `known` are not fetched again, and what is fetched is added to it. Files are not among them any longer.
    """
    parts = media_parts(turns)
    if not parts:
        return NO_MEDIA
    support = model.card.media
    _check_supported(parts, model, support if intake is not None else MediaSupport())
    assert intake is not None, "checked"
    found = {} if known is None else known
    await fetch_parts(parts, intake, found, _limits(intake.limits, support), _target(model.card))
    items = tuple([found[part] for part in parts])
    counts = [_count(model.card, part, item) for part, item in zip(parts, items, strict=True)]
    return LoadedMedia(items, tuple(counts))


async def fetch_parts(
    parts: Iterable[MediaPart],
    intake: MediaFetcher,
    known: dict[MediaPart, MediaItem],
    limits: MediaLimits | None = None,
    target: MediaTarget = DEFAULT_TARGET,
) -> None:
    """Add what these parts name to `known`, fetched at the same time. Raises `ApiError`."""
    loading = {
        part: asyncio.ensure_future(_fetch(intake, part, limits, target)) for part in {*parts} - known.keys()
    }
    try:
        await asyncio.gather(*loading.values())
    finally:
        for one in loading.values():
            one.cancel()
    known.update((part, one.result()) for part, one in loading.items())


def _check_supported(parts: Sequence[MediaPart], model: Model, support: MediaSupport) -> None:
    """Raises `ApiError` 400 for kinds that the model does not take, and for too many items of one."""
    name, limits = model.card.name, support.limits
    embeddings = [part for part in parts if part.kind == "embedding"]
    if embeddings and form_of(model.card) is None:
        raise bad_request(
            f"{name} takes no precomputed embeddings of images; send the images.",
            param=embeddings[0].param,
            code=MediaCode.EMBEDDINGS_OFF.value,
        )
    if embeddings and any(part.kind == "image" for part in parts):
        raise bad_request(
            "A request has images or embeddings of images, not both.", param=embeddings[0].param
        )
    for part in parts:
        if part.kind not in (*limits, "embedding"):
            taken = _listed(["text", *[SEVERAL[kind] for kind in limits]])
            raise bad_request(
                f"{name} takes {taken}; {part.param} is of kind {part.kind}.",
                param=part.param,
                code=MediaCode.NOT_TAKEN.value,
            )
    for kind, most in limits.items():
        own = [part for part in parts if shown_as(part.kind) == kind]
        taken_most = min(most, ITEMS_MAX[kind])
        if len(own) > taken_most:
            raise bad_request(
                f"{len(own)} {SEVERAL[kind]}; {name} takes at most {taken_most} in a request.",
                param=own[taken_most].param,
                code=TOO_MANY[kind],
            )


def _listed(words: Sequence[str]) -> str:
    if len(words) == 1:
        return f"{words[0]} only"
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _limits(limits: MediaLimits, support: MediaSupport) -> MediaLimits:
    """Those of the server, or of the model where it takes less."""
    if support.audio is None:
        return limits
    longest_s = support.audio.samples_max / support.audio.rate_hz
    audio = limits.audio._replace(seconds_max=min(limits.audio.seconds_max, longest_s))
    return limits._replace(audio=audio)


def shown_as(kind: str) -> PromptMediaKind:
    """The kind of an item in the prompt: an embedding is that of an image."""
    return "image" if kind == "embedding" else cast(PromptMediaKind, kind)


def _target(card: ModelCard) -> MediaTarget:
    """What items are decoded to for a model. It decides about their values, and so is part of their ids."""
    target, support = MediaTarget(card.media_processor, embedding=form_of(card)), card.media
    if support.videos is not None:
        target = target._replace(frames=support.videos.frames)
    if support.audio is not None:
        target = target._replace(rate_hz=support.audio.rate_hz)
    return target


async def _fetch(
    intake: MediaFetcher, part: MediaPart, limits: MediaLimits | None, target: MediaTarget
) -> MediaItem:
    source = _source(part)
    outcome = "cancelled"
    try:
        with metrics.MEDIA_SECONDS.labels(part.kind).time():
            item = await intake.fetch(source, limits, target)
        outcome = "ok"
    except ApiError as error:
        outcome = error.code or "error"
        raise
    finally:
        metrics.MEDIA.labels(part.kind, outcome).inc()
    return item


def _source(part: MediaPart) -> MediaSource:
    if part.file_id:
        raise bad_request(
            f"{part.param} names an upload, and this server has no files API.", param=part.param
        )
    if part.data:
        return MediaSource.from_base64(part.kind, part.data, part.param)
    return MediaSource.from_url(part.kind, part.url, part.param)


def _count(card: ModelCard, part: MediaPart, item: MediaItem) -> int:
    kind = shown_as(part.kind)
    try:
        tokens = count_media_tokens(card.media, kind, prompt_shape(item, card))
    except ValueError as error:
        raise bad_request(f"{part.param}: {error}.", param=part.param, code=BAD_SHAPE[kind]) from error
    most = card.tokens_of_item_max(kind)
    if most is not None and tokens > most:
        raise bad_request(
            f"{part.param} has {tokens} tokens; {card.name} takes at most {most} in one item of this kind. Send a smaller or shorter one.",
            param=part.param,
            code=TOO_MANY_TOKENS[kind],
        )
    return tokens


def prompt_shape(item: MediaItem, card: ModelCard) -> tuple[int, ...]:
    """The shape that an item has in messages: of an embedding, that of an image with as many tokens. Raises `ValueError` if there is none."""
    if item.kind != "embedding":
        return item.shape
    assert card.images is not None, "checked"
    assert card.image_embeddings is not None, "checked"
    shape = image_shape(item, card.images, card.image_embeddings)
    tokens = count_media_tokens(card.media, "image", shape)
    if tokens != item.shape[0]:
        raise ValueError(f"the embedding has {item.shape[0]} tokens; an image of its grid has {tokens}")
    return shape
