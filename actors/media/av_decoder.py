"""Decoding of audio and video by FFmpeg."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import BinaryIO, Final

import av
import numpy as np
from av.container import InputContainer
from av.error import FFmpegError
from av.stream import Stream
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from numpy.typing import NDArray

from headwater.actors.media.image_decoder import malformed
from headwater.actors.media.request import (
    FLAC,
    MP3,
    MP4,
    OGG,
    WAV,
    WEBM,
    AudioLimits,
    DecodedMedia,
    FileFormat,
    MediaCode,
    MediaError,
    Sink,
    VideoLimits,
)

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


# Audio: float32, mono, at the rate that the model takes.

RATES_HZ: Final = range(1_000, 768_001)
"""Beyond these a resampler would need filters of any size."""


def decode_audio(
    file: BinaryIO, form: FileFormat, limits: AudioLimits, rate_hz: int, out: Sink
) -> DecodedMedia:
    """Write samples of shape (samples,) to `out`; channels are mixed to one. Raises `MediaError`."""
    samples = 0
    with opened(file, form) as container:
        if not container.streams.audio:
            raise MediaError(MediaCode.WRONG_TYPE, f"The {form.name} file has no sound.")
        stream = container.streams.audio[0]
        check_stream(stream, container, limits.seconds_max)
        if stream.codec_context.layout.nb_channels > limits.channels_max:
            raise MediaError(
                MediaCode.TOO_MANY_CHANNELS, f"The audio has more than {limits.channels_max} channels."
            )
        if stream.codec_context.sample_rate not in RATES_HZ:
            raise malformed(form, "its sample rate is impossible")
        # Channels are averaged here: FFmpeg's own mix to one channel makes equal channels louder.
        resampler = av.AudioResampler(format="fltp", rate=rate_hz)
        # None at the end: what the resampler has left.
        for frame in chain(container.decode(stream), (None,)):
            for piece in resampler.resample(frame):
                values = piece.to_ndarray().mean(axis=0, dtype=np.float32)
                if not np.isfinite(values).all():
                    raise malformed(form, "it has samples that are no numbers")
                samples += values.size
                check_length(samples / rate_hz, limits.seconds_max)
                out.write(values.tobytes())
    if not samples:
        raise malformed(form, "it has no samples")
    return DecodedMedia("float32", (samples,), form.name, samples / rate_hz)


# Video: uint8, RGB, upright frames, sampled evenly from its whole length.

PADDING_PIXELS: Final = 1 << 20
"""Pixels that a decoder may add around a frame. The limit on its memory holds even if frames grow after the header."""


def decode_video(
    file: BinaryIO, form: FileFormat, limits: VideoLimits, frames: int, out: Sink
) -> DecodedMedia:
    """Write at most `frames` frames, shape (frames, height, width, 3), to `out`. Raises `MediaError`.

    Frames are counted first, without decoding them: headers state lengths that nothing has to agree with.
    """
    with opened(file, form) as container:
        stream = _checked_stream(container, form, limits)
        total = _count_frames(container, stream, limits.file_frames_max)
    indices = sample_indices(total, min(frames, limits.frames_max))
    times_s: list[float] = []
    size: tuple[int, int] | None = None
    with opened(file, form) as container:
        stream = _checked_stream(container, form, limits)
        stream.codec_context.options = {"max_pixels": str(limits.pixels_max + PADDING_PIXELS)}
        _check_sampled(stream, len(indices), limits)
        for index, frame in enumerate(container.decode(stream)):
            if len(times_s) == len(indices):
                break
            time_s = float(frame.time or 0.0)
            check_length(time_s, limits.seconds_max)
            if index != indices[len(times_s)]:
                continue
            size = size or (frame.width, frame.height)
            if size != (frame.width, frame.height):
                raise malformed(form, "its frames differ in size")
            picture = _upright(frame)
            out.write(picture.tobytes())
            times_s.append(time_s)
    if not times_s:
        raise malformed(form, "it has no frames")
    return DecodedMedia("uint8", (len(times_s), *picture.shape), form.name, times_s[-1], tuple(times_s))


def sample_indices(total: int, count: int) -> list[int]:
    """Return which of `total` frames are sampled: all of them up to `count`, else the first, the last, and even steps between them."""
    if total <= count:
        return list(range(total))
    if count == 1:
        return [0]
    return [round(step * (total - 1) / (count - 1)) for step in range(count)]


def _count_frames(container: InputContainer, stream: VideoStream, most: int) -> int:
    """Return how many frames the file has, without decoding them."""
    total = 0
    for packet in container.demux(stream):
        total += bool(packet.size)
        if total > most:
            raise MediaError(
                MediaCode.TOO_LONG,
                f"The video has more than {most} frames. Send a part of it, or fewer a second.",
            )
    return total


def _checked_stream(container: InputContainer, form: FileFormat, limits: VideoLimits) -> VideoStream:
    """The file's video, checked by its header."""
    if not container.streams.video:
        raise MediaError(MediaCode.WRONG_TYPE, f"The {form.name} file has no video.")
    stream = container.streams.video[0]
    check_stream(stream, container, limits.seconds_max)
    width, height = stream.codec_context.width, stream.codec_context.height
    if width * height > limits.pixels_max:
        raise MediaError(
            MediaCode.TOO_MANY_PIXELS,
            f"The video has {width} x {height} pixels; at most {limits.pixels_max} are accepted. Scale it down.",
        )
    return stream


def _check_sampled(stream: VideoStream, count: int, limits: VideoLimits) -> None:
    pixels = count * stream.codec_context.width * stream.codec_context.height
    if pixels > limits.sampled_pixels_max:
        raise MediaError(
            MediaCode.TOO_MANY_PIXELS,
            f"{count} frames of the video have {pixels} pixels; at most {limits.sampled_pixels_max} are accepted. "
            "Scale it down.",
        )


def _upright(frame: VideoFrame) -> NDArray[np.uint8]:
    """Turned as the file says: cameras write frames as they lie on the sensor."""
    pixels: NDArray[np.uint8] = np.asarray(frame.to_ndarray(format="rgb24"), np.uint8)
    return np.rot90(pixels, round(frame.rotation / 90))
