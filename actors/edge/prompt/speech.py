"""Recordings for models that transcribe: the prompt of the decoder, pieces of a recording, and the language spoken in it."""

from collections.abc import Mapping
from hashlib import blake2b
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headwater.actors.edge.catalog import Model
from headwater.actors.edge.prompt.media import fetch_counted
from headwater.actors.edge.prompt.request import AudioRecording
from headwater.actors.http.errors import bad_request
from headwater.actors.media.intake import MediaFetcher
from headwater.actors.media.item import ID_BYTES, MediaItem
from headwater.actors.media.request import MediaSource, MediaTarget
from headwater.schemas.hashing import U32
from headwater.schemas.inference import Sampling
from headwater.schemas.media import VALUE_BYTES, PromptMedia
from headwater.schemas.tables import SpeechSupport

# The beginning of the decoder's tokens.

ENGLISH = "en"


def require_speech(model: Model) -> SpeechSupport:
    """Return how the model transcribes. Raises `ApiError` 400 for one that does not."""
    support = model.card.speech
    if support is None:
        raise bad_request(
            f"{model.card.name} does not transcribe speech; use a model with the capability 'transcription'.",
            param="model",
        )
    return support


async def speech_prompt(recording: AudioRecording, model: Model, support: SpeechSupport) -> U32:
    """Token ids of the prompt of every piece. Raises `ApiError` 400 for a language that the model does not know.

    Where the language is to be detected, another one's token is in its place: see `with_language`.
    """
    before: list[int] = []
    if recording.prompt:
        # A leading space: the words follow others.
        encoded = await model.tokenizer.encode(f" {recording.prompt.strip()}", add_special_tokens=False)
        before = [support.previous, *encoded[-support.prompt_max :].tolist()]
    times = support.first_timestamp if recording.timestamps else support.no_timestamps
    return np.array([*before, support.start, *_task(recording, model, support), times], np.uint32)


def _task(recording: AudioRecording, model: Model, support: SpeechSupport) -> list[int]:
    name, language = model.card.name, recording.language
    if not support.languages:
        if language not in ("", ENGLISH):
            raise bad_request(f"{name} transcribes English only.", param="language")
        if recording.translates:
            raise bad_request(f"{name} knows English only: there is nothing to translate.", param="model")
        return []
    if not language and "allowed_tokens" not in model.card.capabilities:
        raise bad_request(
            f"{name} knows {len(support.languages)} languages, and its engine cannot detect which one is spoken: name it "
            "(ISO 639-1, such as 'en').",
            param="language",
        )
    if language and language not in support.languages:
        languages = ", ".join(sorted(support.languages))
        raise bad_request(f"{name} does not know this language; it knows {languages}.", param="language")
    token = support.languages[language] if language else next(iter(support.languages.values()))
    return [token, support.translate if recording.translates else support.transcribe]


# A recording, cut into pieces that the model hears one by one.

SEARCH_S: Final = 3.0
"""The end of each piece, in which its cut is searched."""

QUIET_S: Final = 0.1
"""A cut is in the middle of the quietest time of this length."""


def cuts(samples: NDArray[np.float32], rate_hz: int, window_s: float) -> list[tuple[int, int]]:
    """First and last (exclusive) sample of each piece. None is longer than `window_s`, and they follow each other without a gap."""
    longest = int(window_s * rate_hz)
    search = min(int(SEARCH_S * rate_hz), longest // 2)
    quiet = min(int(QUIET_S * rate_hz), search)
    pieces: list[tuple[int, int]] = []
    begin = 0
    while len(samples) - begin > longest:
        end = begin + longest
        end = end - search + _quietest(samples[end - search : end], quiet)
        pieces.append((begin, end))
        begin = end
    pieces.append((begin, len(samples)))
    return pieces


def _quietest(samples: NDArray[np.float32], length: int) -> int:
    """The middle of the `length` samples with the least energy; of several equally quiet ones, the last."""
    energy = np.concatenate([[0.0], np.cumsum(np.square(samples, dtype=np.float64))])
    sums = energy[length:] - energy[:-length]
    return len(sums) - 1 - int(np.argmin(sums[::-1])) + length // 2


PARAM: Final = "file"


class AudioChunk(NamedTuple):
    """Samples (float32, mono) that a model hears at once. `begin_s` and `seconds` are their place in the recording."""

    id: str
    data: memoryview
    samples: int
    begin_s: float
    seconds: float

    def media(self, prompt_tokens: int) -> PromptMedia:
        """Return the recording as the media of a prompt. It overlaps all tokens, since what the decoder makes of each depends on the audio."""
        return PromptMedia("recording", self.id, 0, prompt_tokens, (self.samples,))


async def load_chunks(
    recording: AudioRecording, support: SpeechSupport, intake: MediaFetcher | None, processor: str = ""
) -> tuple[AudioChunk, ...]:
    """Decode a recording and cut it. `processor` is the digest of the model's settings for media, which is part of ids. Raises `ApiError` 400 for a file that is no audio, or too large or long."""
    if intake is None:
        raise bad_request("This server decodes no media.", param=PARAM)
    source = MediaSource.from_bytes("audio", recording.data, PARAM)
    item = await fetch_counted(intake, source, MediaTarget(processor, support.rate_hz))
    places = cuts(item.array(), support.rate_hz, support.window_s)
    return tuple(_chunk(item, begin, end, support.rate_hz) for begin, end in places)


def _chunk(item: MediaItem, begin: int, end: int, rate_hz: int) -> AudioChunk:
    width = VALUE_BYTES["recording"]
    data = item.data[begin * width : end * width]
    is_whole = end - begin == item.shape[0]
    return AudioChunk(
        item.id if is_whole else _id_of_part(item.id, begin, end),
        data,
        end - begin,
        begin / rate_hz,
        (end - begin) / rate_hz,
    )


def _id_of_part(id_: str, begin: int, end: int) -> str:
    """The id of a part: it follows from the whole and the place, so samples are hashed once."""
    return blake2b(
        f"{id_}[{begin}:{end}]".encode(), digest_size=ID_BYTES, person=b"headwater-media"
    ).hexdigest()


# The spoken language: the likeliest language token after the start of a transcript.

LANGUAGE_AT: Final = -3
"""Place of the language's token in a prompt: the task and the times follow."""


class LanguageDetection(NamedTuple):
    """A prompt of one token whose answer, one token, is a language: id by ISO 639-1 code. It is of the recording's first piece."""

    prompt: U32
    languages: Mapping[str, int]

    @property
    def sampling(self) -> Sampling:
        """The likeliest of the languages."""
        return Sampling(1, temperature=0.0, allowed_token_ids=tuple(sorted(self.languages.values())))

    def language_of(self, token: int) -> str:
        """The code of the language with this token; "" for none."""
        return next((name for name, number in self.languages.items() if number == token), "")


def detection_of(support: SpeechSupport) -> LanguageDetection:
    """Return the detection for a model that knows several languages."""
    return LanguageDetection(np.array([support.start], np.uint32), support.languages)


def with_language(prompt: U32, token: int) -> U32:
    """The prompt of a piece with the language that was detected."""
    patched = prompt.copy()
    patched[LANGUAGE_AT] = token
    return patched
