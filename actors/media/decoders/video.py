"""Video to frames: uint8, RGB, upright, sampled evenly from its whole length."""

from typing import BinaryIO, Final

import numpy as np
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from numpy.typing import NDArray

from headwater.actors.media.decoders.container import check_length, check_stream, opened
from headwater.actors.media.decoders.formats import FileFormat
from headwater.actors.media.decoders.image_size import malformed
from headwater.actors.media.decoders.result import DecodedMedia, Sink
from headwater.actors.media.request.errors import MediaCode, MediaError
from headwater.actors.media.request.settings import VideoLimits

PADDING_PIXELS: Final = 1 << 20
"""That a decoder may add around a frame. The limit on its memory holds if frames grow after the header."""


def decode_video(
    file: BinaryIO, form: FileFormat, limits: VideoLimits, frames: int, out: Sink
) -> DecodedMedia:
    """Write at most `frames` frames, shape (frames, height, width, 3), to `out`. Raises `MediaError`.

    Frames are counted first, without decoding them: headers state lengths that nothing has to agree with.
    """
    with opened(file, form) as container:
        stream = _checked_stream(container, form, limits)
        total = _count_frames(container, stream, limits.file_frames_max)
    wanted = sample_indices(total, min(frames, limits.frames_max))
    times_s: list[float] = []
    size: tuple[int, int] | None = None
    with opened(file, form) as container:
        stream = _checked_stream(container, form, limits)
        stream.codec_context.options = {"max_pixels": str(limits.pixels_max + PADDING_PIXELS)}
        _check_sampled(stream, len(wanted), limits)
        for index, frame in enumerate(container.decode(stream)):
            if len(times_s) == len(wanted):
                break
            time_s = float(frame.time or 0.0)
            check_length(time_s, limits.seconds_max)
            if index != wanted[len(times_s)]:
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
    """Which of `total` frames are sampled: all of them up to `count`, else the first, the last, and even steps between."""
    if total <= count:
        return list(range(total))
    if count == 1:
        return [0]
    return [round(step * (total - 1) / (count - 1)) for step in range(count)]


def _count_frames(container: InputContainer, stream: VideoStream, most: int) -> int:
    """How many frames the file has, without decoding them."""
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
