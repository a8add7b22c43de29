"""Files in conversations, replaced by their text or by an image."""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from headwater.actors.edge.generation.messages.load import fetch_parts, media_parts
from headwater.actors.edge.generation.messages.media_parts import file_text
from headwater.actors.edge.generation.messages.turn import MediaPart, Part, TextPart, Turn
from headwater.actors.http.errors import ApiError, bad_request
from headwater.actors.media.intake import MediaFetcher
from headwater.actors.media.item import MediaItem
from headwater.actors.media.request.errors import MediaCode

FILES_MAX: Final = 16
"""Of one request."""


async def with_texts_of_files(
    turns: Sequence[Turn], intake: MediaFetcher | None, known: dict[MediaPart, MediaItem]
) -> tuple[Turn, ...]:
    """The conversation with each file replaced by its text, or by an image. Raises `ApiError` 400 naming the part at fault.

    What is fetched is added to `known`, as are the images, so that nothing is fetched again.
    """
    files = [part for part in media_parts(turns) if part.kind == "file"]
    if not files:
        return tuple(turns)
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
    await fetch_parts(files, intake, known)
    replaced = {part: _replacement(part, known[part]) for part in files}
    known.update((new, known[part]) for part, new in replaced.items() if isinstance(new, MediaPart))
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
        if new is not part and isinstance(new, TextPart) and _is_within_line(parts):
            new = TextPart("\n" + new.text)
        parts.append(new)
    return msgspec.structs.replace(turn, parts=tuple(parts))


def _is_within_line(parts: Sequence[Part]) -> bool:
    return bool(parts) and isinstance(parts[-1], TextPart) and not parts[-1].text.endswith("\n")
