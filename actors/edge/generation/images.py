"""Images and files in conversations: fetched and decoded by the media intake. Files become text or images, and placeholder tokens
of images are put into the prompt.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Final, NamedTuple

import msgspec
import numpy as np

from headwater.actors import metrics
from headwater.actors.edge.generation.media import file_text
from headwater.actors.edge.generation.request import GenerationRequest, MediaPart, Part, TextPart, Turn
from headwater.actors.edge.model.catalog import Model
from headwater.actors.http.errors import ApiError, bad_request
from headwater.actors.media.intake import MediaIntake
from headwater.actors.media.item import ID_BYTES, MediaItem
from headwater.actors.media.request.errors import MediaCode
from headwater.actors.media.request.source import MediaKind as SourceKind
from headwater.actors.media.request.source import MediaSource
from headwater.schemas.hashing import U32
from headwater.schemas.image_tokens import count_image_tokens
from headwater.schemas.messages.media import PromptMedia
from headwater.schemas.tables.card import ImageSupport

IMAGES_MAX: Final = 16
"""Of one request, whatever the model takes."""

FILES_MAX: Final = 16
"""Of one request."""


class PromptImages(NamedTuple):
    """The decoded images of a conversation in its order, and the number of placeholder tokens of each."""

    items: tuple[MediaItem, ...] = ()
    tokens: tuple[int, ...] = ()


NO_IMAGES: Final = PromptImages()


def media_parts(turns: Iterable[Turn]) -> list[MediaPart]:
    """The media of a conversation, in order."""
    return [part for turn in turns for part in turn.parts if isinstance(part, MediaPart)]


async def load_images(
    turns: Sequence[Turn],
    model: Model,
    intake: MediaIntake | None,
    known: dict[MediaPart, MediaItem] | None = None,
) -> PromptImages:
    """Fetch and decode the images of a conversation, at the same time. Raises `ApiError` 400 naming the part at fault.

    Those in `known` are not fetched again, and what is fetched is added to it.
    """
    parts = media_parts(turns)
    if not parts:
        return NO_IMAGES
    support = _check_supported(parts, model, intake)
    assert intake is not None, "checked"
    found = {} if known is None else known
    await _load(parts, intake, found)
    items = tuple(found[part] for part in parts)
    counts = (_count(support, part, item) for part, item in zip(parts, items, strict=True))
    return PromptImages(items, tuple(counts))


async def with_texts_of_files(
    request: GenerationRequest, intake: MediaIntake | None, known: dict[MediaPart, MediaItem]
) -> GenerationRequest:
    """The request with each file replaced by its text, or by an image. Raises `ApiError` 400 naming the part at fault.

    What is fetched is added to `known`, as are the images, so that nothing is fetched again.
    """
    files = [part for part in media_parts(request.messages) if part.kind == "file"]
    if not files:
        return request
    if len(files) > FILES_MAX:
        raise bad_request(
            f"{len(files)} files; a request may have at most {FILES_MAX}.",
            param=files[FILES_MAX].param,
            code="too_many_files",
        )
    if intake is None:
        raise ApiError(
            400, "This server takes no files.", param=files[0].param, code=MediaCode.UNAVAILABLE.value
        )
    await _load(files, intake, known)
    replaced = {part: _replacement(part, known[part]) for part in files}
    known.update((new, known[part]) for part, new in replaced.items() if isinstance(new, MediaPart))
    turns = tuple([_with_replaced(turn, replaced) for turn in request.messages])
    return msgspec.structs.replace(request, messages=turns)


def _replacement(part: MediaPart, item: MediaItem) -> Part:
    if item.kind == "image":
        return msgspec.structs.replace(part, kind="image")
    return TextPart(file_text(part.name, str(item.data, "utf-8")))


def _with_replaced(turn: Turn, replaced: Mapping[MediaPart, Part]) -> Turn:
    """The turn with these parts. A file begins on a line of its own, as templates join texts with nothing between."""
    parts: list[Part] = []
    for part in turn.parts:
        new = replaced.get(part, part) if isinstance(part, MediaPart) else part
        if new is not part and isinstance(new, TextPart) and _is_within_line(parts):
            new = TextPart("\n" + new.text)
        parts.append(new)
    return msgspec.structs.replace(turn, parts=tuple(parts))


def _is_within_line(parts: Sequence[Part]) -> bool:
    return bool(parts) and isinstance(parts[-1], TextPart) and not parts[-1].text.endswith("\n")


async def _load(parts: Iterable[MediaPart], intake: MediaIntake, known: dict[MediaPart, MediaItem]) -> None:
    """Add what these parts name to `known`, fetched at the same time. Raises `ApiError`."""
    loading = {part: asyncio.ensure_future(_fetch(intake, part)) for part in {*parts} - known.keys()}
    try:
        await asyncio.gather(*loading.values())
    finally:
        for one in loading.values():
            one.cancel()
    known.update((part, one.result()) for part, one in loading.items())


def _check_supported(parts: Sequence[MediaPart], model: Model, intake: MediaIntake | None) -> ImageSupport:
    card = model.card
    support = card.images if intake is not None else None
    for part in parts:
        if support is None:
            raise bad_request(
                f"{card.name} takes text only; {part.param} is of kind {part.kind}.", param=part.param
            )
        if part.kind != "image":
            raise bad_request(
                f"{card.name} takes text and images; {part.param} is of kind {part.kind}.", param=part.param
            )
    assert support is not None, "there is at least one part"
    most = min(support.per_prompt, IMAGES_MAX)
    if len(parts) > most:
        raise bad_request(
            f"{len(parts)} images; {card.name} takes at most {most} in a request.",
            param=parts[most].param,
            code="too_many_images",
        )
    return support


async def _fetch(intake: MediaIntake, part: MediaPart) -> MediaItem:
    source = _source(part)
    outcome = "cancelled"
    try:
        with metrics.MEDIA_SECONDS.labels(part.kind).time():
            item = await intake.fetch(source)
        outcome = "ok"
    except ApiError as error:
        outcome = error.code or "error"
        raise
    finally:
        metrics.MEDIA.labels(part.kind, outcome).inc()
    return item


def _source(part: MediaPart) -> MediaSource:
    kind: SourceKind = "file" if part.kind == "file" else "image"
    if part.file_id:
        raise bad_request(
            f"{part.param} names an upload, and this server has no files API.", param=part.param
        )
    if part.data:
        return MediaSource.from_base64(kind, part.data, part.param)
    return MediaSource.from_url(kind, part.url, part.param)


def _count(support: ImageSupport, part: MediaPart, item: MediaItem) -> int:
    try:
        return count_image_tokens(support, item.height, item.width)
    except ValueError as error:
        raise bad_request(f"{part.param}: {error}.", param=part.param, code="image_shape") from error


def expand_placeholders(
    tokens: U32, images: PromptImages, model: Model, param: str
) -> tuple[U32, tuple[PromptMedia, ...]]:
    """The prompt with each image's placeholder token repeated, and where each image is. Raises `ApiError` 400."""
    support = model.card.images
    if support is None:
        return tokens, ()
    places = np.flatnonzero(tokens == support.placeholder)
    if len(places) != len(images.items):
        raise _unmatched(len(places), len(images.items), param)
    if not len(places):
        return tokens, ()
    repeats = np.ones(len(tokens), np.int64)
    repeats[places] = images.tokens
    starts = (np.cumsum(repeats) - repeats)[places].tolist()
    media = tuple(
        PromptMedia("image", item.id, start, count, item.shape)
        for item, start, count in zip(images.items, starts, images.tokens, strict=True)
    )
    return np.repeat(tokens, repeats).astype(np.uint32, copy=False), media


def of_tenant(media: Sequence[PromptMedia], salt: str) -> tuple[PromptMedia, ...]:
    """The images under ids that tenants with other salts cannot have.

    Blocks are kept apart by the salt of their hashes, but engines and workers also keep images and embeddings by their ids alone: how soon
    an answer begins would reveal that another tenant has sent the same image.
    """
    key = blake2b(salt.encode(), digest_size=ID_BYTES, person=b"headwater-tenant").digest()
    return tuple(
        msgspec.structs.replace(item, id=blake2b(item.id.encode(), digest_size=ID_BYTES, key=key).hexdigest())
        for item in media
    )


def _unmatched(places: int, images: int, param: str) -> ApiError:
    if images:
        return bad_request(
            f"The model's chat template made {places} places for {images} images; it does not take images here.",
            param=param,
        )
    return bad_request("The prompt spells the token that stands for an image, without an image.", param=param)
