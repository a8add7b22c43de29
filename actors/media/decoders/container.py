"""Files of audio and video, opened with FFmpeg: one format, a list of codecs, one thread, nothing but the file itself."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, Final

import av
from av.container import InputContainer
from av.error import FFmpegError
from av.stream import Stream

from headwater.actors.media.decoders.formats import FLAC, MP3, MP4, OGG, WAV, WEBM, FileFormat
from headwater.actors.media.decoders.image_size import malformed
from headwater.actors.media.request.errors import MediaCode, MediaError

DEMUXERS: Final = {WAV: "wav", FLAC: "flac", OGG: "ogg", MP3: "mp3", MP4: "mov", WEBM: "matroska"}
"""FFmpeg would otherwise guess, and some of its formats are lists of other files and addresses."""

CODECS: Final = frozenset(
    [
        "aac",
        "flac",
        "mp3",
        "mp3float",
        "opus",
        "libopus",
        "vorbis",
        "libvorbis",
        "h264",
        "hevc",
        "mpeg4",
        "vp8",
        "libvpx",
        "vp9",
        "libvpx-vp9",
        "av1",
        "libdav1d",
    ]
)
"""Besides uncompressed audio (`pcm_*`)."""

OPTIONS: Final = {"protocol_whitelist": "", "max_streams": "16"}

MICROSECONDS: Final = 1_000_000


@contextmanager
def opened(file: BinaryIO, form: FileFormat) -> Iterator[InputContainer]:
    """The file's container. Errors of FFmpeg within the block become `MediaError`."""
    file.seek(0)
    try:
        with av.open(
            file, mode="r", format=DEMUXERS[form], options=dict(OPTIONS), metadata_errors="replace"
        ) as container:
            yield container
    except MemoryError:
        raise
    except (FFmpegError, EOFError, ValueError) as error:
        raise malformed(form, "it cannot be decoded") from error


def check_stream(stream: Stream, container: InputContainer, seconds_max: float) -> None:
    """Raises `MediaError` for a codec that is not listed, or a length above the limit by the file's header."""
    name = stream.codec_context.name
    if name not in CODECS and not name.startswith("pcm_"):
        raise MediaError(MediaCode.CODEC, f"Media with the codec {name!r} are not accepted.")
    stream.codec_context.thread_count = 1
    stated_s = max(
        float(stream.duration * stream.time_base) if stream.duration and stream.time_base else 0.0,
        container.duration / MICROSECONDS if container.duration else 0.0,
    )
    check_length(stated_s, seconds_max)


def check_length(seconds: float, seconds_max: float) -> None:
    """Raises `MediaError` for more seconds than allowed."""
    if seconds > seconds_max:
        raise MediaError(
            MediaCode.TOO_LONG, f"The media are longer than {seconds_max:g} s. Send a part of them."
        )
