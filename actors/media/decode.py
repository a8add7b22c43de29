"""The decoder for each kind of media. Libraries are imported when the first item of the kind arrives."""

from typing import BinaryIO

from headwater.actors.media.formats import HEAD_BYTES, DecodedMedia, Sink, check_format
from headwater.actors.media.request import MediaCode, MediaError, MediaKind, MediaLimits, MediaTarget


def decode(
    file: BinaryIO, kind: MediaKind, limits: MediaLimits, target: MediaTarget, out: Sink
) -> DecodedMedia:
    """Write the item's values to `out`. Raises `MediaError`, and ImportError without the extra `media`."""
    if kind == "file":
        from headwater.actors.media.document_decoder import decode_document

        return decode_document(file, limits, out)
    form = check_format(file.read(HEAD_BYTES), kind)
    file.seek(0)
    if kind == "image":
        from headwater.actors.media.image_decoder import decode_image

        return decode_image(file, form, limits.image, out, mask=target.mask)
    if kind == "audio":
        from headwater.actors.media.av_decoder import decode_audio

        return decode_audio(file, form, limits.audio, target.rate_hz, out)
    if kind == "video":
        from headwater.actors.media.av_decoder import decode_video

        return decode_video(file, form, limits.video, target.frames, out)
    from headwater.actors.media.embedding_decoder import decode_embedding

    if target.embedding is None:
        raise MediaError(MediaCode.EMBEDDINGS_OFF, "The model takes no precomputed embeddings.")
    return decode_embedding(file, form, limits.embedding, target.embedding, out)
