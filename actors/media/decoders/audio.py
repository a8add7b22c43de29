"""Sound to samples: float32, mono, at the rate that the model takes."""

from itertools import chain
from typing import BinaryIO, Final

import av
import numpy as np

from headwater.actors.media.decoders.container import check_length, check_stream, opened
from headwater.actors.media.decoders.formats import FileFormat
from headwater.actors.media.decoders.image_size import malformed
from headwater.actors.media.decoders.result import DecodedMedia, Sink
from headwater.actors.media.request.errors import MediaCode, MediaError
from headwater.actors.media.request.settings import AudioLimits

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
