"""The decoder for each kind of media. Libraries are imported when the first item of the kind arrives."""

from typing import BinaryIO

from headwater.actors.media.decoders.formats import HEAD_BYTES, check_format
from headwater.actors.media.decoders.result import DecodedMedia, Sink
from headwater.actors.media.request.errors import MediaCode, MediaError
from headwater.actors.media.request.settings import MediaLimits
from headwater.actors.media.request.source import MediaKind, MediaTarget


def decode(
    file: BinaryIO, kind: MediaKind, limits: MediaLimits, target: MediaTarget, out: Sink
) -> DecodedMedia:
    """Write the item's values to `out`. Raises `MediaError`, and ImportError without the extra `media`."""
    form = check_format(file.read(HEAD_BYTES), kind)
    file.seek(0)
    if kind == "image":
        from headwater.actors.media.decoders.image import decode_image

        return decode_image(file, form, limits.image, out)
    raise MediaError(MediaCode.UNAVAILABLE, f"This server decodes images only, not {kind}.")
