"""The media of messages: checked against what the model takes, and loaded by the media intake.

Base64 is not decoded here: the media intake does that in a process of its own, as megabytes of it would stop the event loop.
"""

import asyncio
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast
from urllib.parse import urlsplit

import msgspec

from headwater.actors import metrics
from headwater.actors.edge.catalog import Model
from headwater.actors.edge.prompt.request import MediaKind, MediaPart, Part, TextPart, Turn
from headwater.actors.http.errors import ApiError, bad_field, bad_request
from headwater.actors.media.intake import DEFAULT_TARGET, MediaFetcher
from headwater.actors.media.item import MediaItem
from headwater.actors.media.request import (
    GRID,
    EmbeddingForm,
    MediaCode,
    MediaLimits,
    MediaSource,
    MediaTarget,
    TensorType,
)
from headwater.schemas.media import SEVERAL, ClientEmbedding, DType, PromptMediaKind
from headwater.schemas.tables import (
    EmbeddingSupport,
    ImageSupport,
    MediaSupport,
    ModelCard,
    count_media_tokens,
)

# Embeddings that clients send in place of images.

TENSOR_TYPES: Final[dict[DType, TensorType]] = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""The names of these types in safetensors."""


def form_of(card: ModelCard) -> EmbeddingForm | None:
    """Return what the media intake checks embeddings against; None where clients may send none."""
    support = card.image_embeddings
    if support is None or card.images is None:
        return None
    return EmbeddingForm(support.width, (TENSOR_TYPES[support.dtype],), grid=bool(support.merge))


def image_shape(item: MediaItem, images: ImageSupport, support: EmbeddingSupport) -> tuple[int, int, int]:
    """The shape of an image whose embedding this could be. Raises `ValueError` for a grid of patches that no image has."""
    if not support.merge:
        return 1, 1, 3
    _, rows, columns = item.grid
    if rows % support.merge or columns % support.merge:
        raise ValueError(f"its grid of {rows} x {columns} patches is not divisible by {support.merge}")
    patch = images.side // support.merge
    return rows * patch, columns * patch, 3


def given_of(item: MediaItem) -> ClientEmbedding:
    """Return what a worker needs to know of the embedding."""
    dtype = next(name for name, spelled in TENSOR_TYPES.items() if spelled == item.dtype)
    return ClientEmbedding(dtype, item.width, msgspec.json.encode({GRID: item.grid} if item.grid else {}))


# Media, checked and loaded.

ITEMS_MAX: Final[Mapping[PromptMediaKind, int]] = {"image": 16, "video": 4, "audio": 16}
"""The most items of each kind in one request, whatever the model takes."""


TOO_MANY: Final[Mapping[PromptMediaKind, str]] = {
    "image": "too_many_images",
    "video": "too_many_videos",
    "audio": "too_many_audio_clips",
}
BAD_SHAPE: Final[Mapping[PromptMediaKind, str]] = {
    "image": "image_shape",
    "video": "video_shape",
    "audio": "audio_shape",
}
TOO_MANY_TOKENS: Final[Mapping[PromptMediaKind, str]] = {
    "image": "image_tokens",
    "video": "video_tokens",
    "audio": "audio_tokens",
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
    fetched: dict[MediaPart, MediaItem] | None = None,
) -> LoadedMedia:
    """Fetch and decode the media of a conversation, at the same time. Raises `ApiError` 400 naming the part at fault.

    Those in `fetched` are not fetched again, and what is fetched is added to it. Files are not among them any longer.
    """
    parts = media_parts(turns)
    if not parts:
        return NO_MEDIA
    support = model.card.media
    _check_supported(parts, model, support if intake is not None else MediaSupport())
    assert intake is not None, "checked"
    by_part = {} if fetched is None else fetched
    await fetch_parts(parts, intake, by_part, _limits(intake.limits, support), _target(model.card))
    items = tuple([by_part[part] for part in parts])
    counts = [_count(model.card, part, item) for part, item in zip(parts, items, strict=True)]
    return LoadedMedia(items, tuple(counts))


async def fetch_parts(
    parts: Iterable[MediaPart],
    intake: MediaFetcher,
    fetched: dict[MediaPart, MediaItem],
    limits: MediaLimits | None = None,
    target: MediaTarget = DEFAULT_TARGET,
) -> None:
    """Add what these parts name to `fetched`, fetched at the same time. Raises `ApiError`."""
    # All sources before the first fetch: one that is refused leaves none behind.
    sources = {part: part.source() for part in {*parts} - fetched.keys()}
    loading = {
        part: asyncio.ensure_future(fetch_counted(intake, source, target, limits))
        for part, source in sources.items()
    }
    try:
        await asyncio.gather(*loading.values())
    finally:
        for task in loading.values():
            task.cancel()
    fetched.update((part, task.result()) for part, task in loading.items())


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
            accepted_kinds = _listed(["text", *[SEVERAL[kind] for kind in limits]])
            raise bad_request(
                f"{name} takes {accepted_kinds}; {part.param} is of kind {part.kind}.",
                param=part.param,
                code=MediaCode.NOT_TAKEN.value,
            )
    for kind, most in limits.items():
        parts_of_kind = [part for part in parts if shown_as(part.kind) == kind]
        taken_most = min(most, ITEMS_MAX[kind])
        if len(parts_of_kind) > taken_most:
            raise bad_request(
                f"{len(parts_of_kind)} {SEVERAL[kind]}; {name} takes at most {taken_most} in a request.",
                param=parts_of_kind[taken_most].param,
                code=TOO_MANY[kind],
            )


def refuse_too_many(parts: Sequence[MediaPart], most: int, name: str, code: str) -> None:
    """Raises `ApiError` 400 for more items of a kind, whose plural is `name`, than a request may have."""
    if len(parts) > most:
        raise bad_request(
            f"{len(parts)} {name}; a request may have at most {most}.", param=parts[most].param, code=code
        )


def _listed(words: Sequence[str]) -> str:
    if len(words) == 1:
        return f"{words[0]} only"
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _limits(limits: MediaLimits, support: MediaSupport) -> MediaLimits:
    """Return the limits of the server, or those of the model where it takes less."""
    if support.audio is None:
        return limits
    longest_s = support.audio.samples_max / support.audio.rate_hz
    audio = limits.audio._replace(seconds_max=min(limits.audio.seconds_max, longest_s))
    return limits._replace(audio=audio)


def shown_as(kind: str) -> PromptMediaKind:
    """The kind of an item in the prompt: an embedding is that of an image."""
    return "image" if kind == "embedding" else cast(PromptMediaKind, kind)


def _target(card: ModelCard) -> MediaTarget:
    """Return what items are decoded to for a model. It decides about their values, and so is part of their ids."""
    target, support = MediaTarget(card.media_processor, embedding=form_of(card)), card.media
    if support.videos is not None:
        target = target._replace(frames=support.videos.frames)
    if support.audio is not None:
        target = target._replace(rate_hz=support.audio.rate_hz)
    return target


async def fetch_counted(
    intake: MediaFetcher, source: MediaSource, target: MediaTarget, limits: MediaLimits | None = None
) -> MediaItem:
    """Fetch and decode an item; metrics count it by what became of it. Raises `ApiError`."""
    outcome = "cancelled"
    try:
        with metrics.MEDIA_SECONDS.labels(source.kind).time():
            item = await intake.fetch(source, limits, target)
        outcome = "ok"
    except ApiError as error:
        outcome = error.code or "error"
        raise
    finally:
        metrics.MEDIA.labels(source.kind, outcome).inc()
    return item


def _count(card: ModelCard, part: MediaPart, item: MediaItem) -> int:
    kind = shown_as(part.kind)
    try:
        tokens = count_media_tokens(card.media, kind, prompt_shape(item, card))
    except ValueError as error:
        raise bad_request(f"{part.param}: {error}.", param=part.param, code=BAD_SHAPE[kind]) from error
    most = card.tokens_of_item_max(kind)
    if most is not None and tokens > most:
        raise bad_field(
            part.param,
            f"has {tokens} tokens; {card.name} takes at most {most} in one item of this kind. Send a "
            "smaller or shorter one.",
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


# The forms in which media come, neither fetched nor decoded.

URL_CHARACTERS_MAX: Final = 8_192
NAME_CHARACTERS_MAX: Final = 255
UNNAMED: Final = "unnamed"

_DATA_URL: Final = re.compile(
    r"data:([\w.+-]{1,64}/[\w.+-]{1,64})?(?:;[\w.+-]{1,64}=[\w.+-]{1,64})*;base64,", re.IGNORECASE
)
"""Its type may be left out: the first bytes of the data decide what it is."""

_DATA: Final = "data:"


def url_media(kind: MediaKind, url: Any, param: str, *, detail: str = "") -> MediaPart:
    """Media behind a URL: https:, http:, file: or data: with base64. Which of them are accepted, the media intake decides. Raises `ApiError` 400 naming `param`."""
    if not isinstance(url, str) or not url:
        raise bad_field(param, "must have a URL.")
    if url[: len(_DATA)].lower() == _DATA:
        head = _DATA_URL.match(url[:512])
        if head is None:
            raise bad_field(param, "must be data:TYPE;base64,DATA.")
        return MediaPart(kind, param, url=url, media_type=(head[1] or "").lower(), detail=detail)
    if len(url) > URL_CHARACTERS_MAX:
        raise bad_field(param, f"is longer than {URL_CHARACTERS_MAX} characters.")
    try:
        parts = urlsplit(url)
        valid = parts.scheme == "file" or (parts.scheme in ("http", "https") and bool(parts.hostname))
    except ValueError:
        valid = False
    if not valid:
        raise bad_field(param, "must be an https: or a data: URL.")
    return MediaPart(kind, param, url=url, detail=detail)


def file_media(
    param: str, *, name: Any = None, data: Any = None, url: Any = None, file_id: Any = None
) -> MediaPart:
    """A file: its bytes as a data URL or as base64, or a URL. Raises `ApiError` 400 naming the field at fault."""
    if file_id:
        raise bad_field(
            f"{param}.file_id",
            f"names an upload, and this server has no files API. Send the file in {param}.file_data.",
        )
    if name is not None and not isinstance(name, str):
        raise bad_field(f"{param}.filename", "must be a string.")
    if url and not data:
        part = url_media("file", url, f"{param}.file_url")
    elif isinstance(data, str) and data[: len(_DATA)].lower() == _DATA:
        part = url_media("file", data, f"{param}.file_data")
    else:
        part = data_media("file", data, f"{param}.file_data", media_type="")
    return msgspec.structs.replace(part, name=name or "")


def data_media(kind: MediaKind, data: Any, param: str, *, media_type: str, form: str = "") -> MediaPart:
    """Media as base64. Raises `ApiError` 400 naming `param` if there are none."""
    if not isinstance(data, str) or not data:
        raise bad_field(param, "must have base64 data.")
    return MediaPart(kind, param, data=data, media_type=media_type, format=form)


def audio_media(value: Any, param: str) -> MediaPart:
    """OpenAI's `input_audio`: base64 and the name of its encoding. Raises `ApiError` 400 naming the field at fault."""
    audio = value if isinstance(value, dict) else {}
    form = audio.get("format")
    if not isinstance(form, str) or not form.isalnum() or len(form) > 16:
        raise bad_field(f"{param}.format", "names the encoding, such as wav or mp3.")
    return data_media("audio", audio.get("data"), param, media_type=f"audio/{form}", form=form)


def file_text(name: str, text: str) -> str:
    """A file as the model sees it: its text between lines that name it."""
    shown = shown_name(name)
    end = "" if text.endswith("\n") else "\n"
    return f"[File: {shown}]\n{text}{end}[End of file: {shown}]\n"


def shown_name(name: str) -> str:
    """A file's name on one line: without folders, control characters and brackets."""
    base = name.replace("\\", "/").rpartition("/")[2]
    plain = "".join(
        character
        for character in base
        if (character not in "[]" and unicodedata.category(character)[0] not in "CZ") or character == " "
    )
    return plain.strip()[:NAME_CHARACTERS_MAX] or UNNAMED


# Files, replaced by their text or by an image.

FILES_MAX: Final = 16
"""The most files in one request."""


async def with_texts_of_files(
    turns: Sequence[Turn], intake: MediaFetcher | None, fetched: dict[MediaPart, MediaItem]
) -> tuple[Turn, ...]:
    """The conversation with each file replaced by its text, or by an image. Raises `ApiError` 400 naming the part at fault.

    What is fetched is added to `fetched`, as are the images, so that nothing is fetched again.
    """
    files = [part for part in media_parts(turns) if part.kind == "file"]
    if not files:
        return tuple(turns)
    refuse_too_many(files, FILES_MAX, "files", "too_many_files")
    if intake is None:
        raise ApiError(
            400, "This server takes no files.", param=files[0].param, code=MediaCode.UNAVAILABLE.value
        )
    await fetch_parts(files, intake, fetched)
    replaced = {part: _replacement(part, fetched[part]) for part in files}
    fetched.update((new, fetched[part]) for part, new in replaced.items() if isinstance(new, MediaPart))
    return tuple([_with_replaced(turn, replaced) for turn in turns])


def _replacement(part: MediaPart, item: MediaItem) -> Part:
    if item.kind == "image":
        return msgspec.structs.replace(part, kind="image")
    return TextPart(file_text(part.name, str(item.data, "utf-8")))


def _with_replaced(turn: Turn, replaced: Mapping[MediaPart, Part]) -> Turn:
    """The turn with these parts. A file begins on a line of its own, as templates join texts with nothing between."""
    parts: list[Part] = []
    for part in turn.parts:
        new = replaced.get(part, part) if isinstance(part, MediaPart) else part
        last = parts[-1] if parts else None
        within_line = isinstance(last, TextPart) and not last.text.endswith("\n")
        if within_line and new is not part and isinstance(new, TextPart):
            new = TextPart("\n" + new.text)
        parts.append(new)
    return msgspec.structs.replace(turn, parts=tuple(parts))
