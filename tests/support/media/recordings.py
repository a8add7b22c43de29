"""Audio, video and embeddings of tests, written by the libraries' own encoders."""

import io
import json
import struct
from typing import Any

import av
import numpy as np

RATE_HZ = 8_000


def tone(
    seconds: float, rate_hz: int = RATE_HZ, channels: int = 1, hz: float = 440.0
) -> "np.ndarray[Any, Any]":
    """A sine as 16-bit samples, shape (samples, channels)."""
    times_s = np.arange(round(seconds * rate_hz)) / rate_hz
    one = (np.sin(2 * np.pi * hz * times_s) * 16_000).astype("<i2")
    return np.repeat(one[:, None], channels, axis=1)


def wav(samples: "np.ndarray[Any, Any]", rate_hz: int = RATE_HZ, *, tag: int = 1) -> bytes:
    """A WAV file; `tag` 1 is for integers, 3 for floats."""
    channels, width = samples.shape[1], samples.dtype.itemsize
    head = struct.pack(
        "<HHIIHH", tag, channels, rate_hz, rate_hz * channels * width, channels * width, 8 * width
    )
    data = samples.tobytes()
    body = (
        b"WAVE"
        + b"fmt "
        + struct.pack("<I", len(head))
        + head
        + b"data"
        + struct.pack("<I", len(data))
        + data
    )
    return b"RIFF" + struct.pack("<I", len(body)) + body


def recording(form: str, codec: str, seconds: float, rate_hz: int = RATE_HZ) -> bytes:
    """A tone in another format."""
    out = io.BytesIO()
    with av.open(out, "w", format=form) as container:
        stream = container.add_stream(codec, rate=rate_hz, layout="mono")
        assert isinstance(stream, av.AudioStream)
        frame = av.AudioFrame.from_ndarray(tone(seconds, rate_hz).T.copy(), format="s16p", layout="mono")
        frame.sample_rate = rate_hz
        resampler = av.AudioResampler(
            format=stream.codec_context.format,
            layout="mono",
            rate=rate_hz,
            frame_size=stream.codec_context.frame_size,
        )
        for part in (frame, None):
            for piece in resampler.resample(part):
                container.mux(stream.encode(piece))
        container.mux(stream.encode(None))
    return out.getvalue()


def film(
    frames: int,
    form: str = "mp4",
    codec: str = "mpeg4",
    size: tuple[int, int] = (32, 16),
    per_s: int = 10,
    first: int = 0,
) -> bytes:
    """A video whose frame n is gray of brightness `first` + 8 n, with a white left half."""
    out = io.BytesIO()
    with av.open(out, "w", format=form) as container:
        stream = container.add_stream(codec, rate=per_s)
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for number in range(frames):
            pixels = np.full((size[1], size[0], 3), (first + 8 * number) % 256, np.uint8)
            pixels[:, : size[0] // 2] = 255
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))
    return out.getvalue()


def turned(video: bytes) -> bytes:
    """An MP4 whose header says that it must be turned by a quarter, clockwise."""
    identity = struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
    quarter = struct.pack(">9i", 0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30)
    at = video.index(identity, video.index(b"tkhd"))
    return video[:at] + quarter + video[at + len(identity) :]


def safetensors(dtype: str, shape: tuple[int, ...], data: bytes, *names: str) -> bytes:
    """A file with tensors of this form, all over the same length."""
    names = names or ("embedding",)
    spans = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": [n * len(data), (n + 1) * len(data)]}
        for n, name in enumerate(names)
    }
    head = json.dumps(spans).encode()
    return struct.pack("<Q", len(head)) + head + data * len(names)
