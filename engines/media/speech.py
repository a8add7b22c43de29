"""Speech: how a Whisper model transcribes, from its own files, and the recording of a request."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from headwater.engines.engine import RequestRejected
from headwater.schemas.messages.media import PromptMedia
from headwater.schemas.tables.card import SpeechSupport

WHISPER: Final = "whisper"
"""The type of such a model in its configuration."""

ENGLISH_VOCABULARY: Final = 51_864
"""Tokens of the models that know English only; the others have a token more, and more languages."""

TIMESTAMP_S: Final = 0.02


def whisper_support(
    features: Any, vocabulary: Mapping[str, int], *, size: int, context: int
) -> SpeechSupport:
    """How a Whisper model transcribes.

    `features` is its feature extractor, `vocabulary` its tokens by name, `size` how many its configuration has, `context` the tokens of a prompt
    and its answer.
    """
    no_timestamps = vocabulary["<|notimestamps|>"]
    start, translate = vocabulary["<|startoftranscript|>"], vocabulary["<|translate|>"]
    names = {number: name for name, number in vocabulary.items()}
    # The tokens between are those of languages.
    languages = {
        names[number].strip("<|>"): number for number in range(start + 1, translate) if number in names
    }
    return SpeechSupport(
        window_s=float(features.chunk_length),
        rate_hz=int(features.sampling_rate),
        start=start,
        previous=vocabulary["<|startofprev|>"],
        no_timestamps=no_timestamps,
        first_timestamp=no_timestamps + 1,
        timestamp_s=TIMESTAMP_S,
        prompt_max=context // 2 - 1,
        languages=languages if size > ENGLISH_VOCABULARY else {},
        transcribe=vocabulary["<|transcribe|>"],
        translate=translate,
    )


def check_recording(media: Sequence[PromptMedia], support: SpeechSupport) -> PromptMedia:
    """The one recording of a request, whole and of a length that the model hears at once. Raises `RequestRejected`."""
    if len(media) != 1:
        raise RequestRejected(f"{len(media)} recordings to transcribe: one at a time", param="file")
    (item,) = media
    if len(item.data) != item.size or not item.size:
        raise RequestRejected(f"a recording of {item.size} bytes came with {len(item.data)}", param="file")
    if item.shape[0] > support.window_s * support.rate_hz:
        raise RequestRejected(f"the recording is longer than {support.window_s:g} s", param="file")
    return item


def samples_of(item: PromptMedia) -> NDArray[np.float32]:
    """Its samples."""
    return np.frombuffer(item.data, np.float32)
