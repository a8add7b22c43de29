"""A recording, decoded by the media intake and cut into pieces that the model hears one by one."""

from hashlib import blake2b
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headwater.actors import metrics
from headwater.actors.edge.generation.speech.recording import AudioRecording
from headwater.actors.http.errors import ApiError, bad_request
from headwater.actors.media.intake import MediaFetcher
from headwater.actors.media.item import ID_BYTES, MediaItem
from headwater.actors.media.request.source import MediaSource, MediaTarget
from headwater.schemas.messages.media import VALUE_BYTES, PromptMedia
from headwater.schemas.tables.card import SpeechSupport

SEARCH_S: Final = 3.0
"""The end of each piece, in which its cut is searched."""

QUIET_S: Final = 0.1
"""A cut is in the middle of the quietest time of this length."""


def cuts(samples: NDArray[np.float32], rate_hz: int, window_s: float) -> list[tuple[int, int]]:
    """First and last (exclusive) sample of each piece. None is longer than `window_s`, and they follow each other without a gap."""
    longest = int(window_s * rate_hz)
    search = min(int(SEARCH_S * rate_hz), longest // 2)
    quiet = min(int(QUIET_S * rate_hz), search)
    found: list[tuple[int, int]] = []
    begin = 0
    while len(samples) - begin > longest:
        end = begin + longest
        end = end - search + _quietest(samples[end - search : end], quiet)
        found.append((begin, end))
        begin = end
    found.append((begin, len(samples)))
    return found


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
        """As the media of a prompt: what the decoder makes of each token depends on the audio, so it overlaps all of them."""
        return PromptMedia("recording", self.id, 0, prompt_tokens, (self.samples,))


async def load_chunks(
    recording: AudioRecording, support: SpeechSupport, intake: MediaFetcher | None, processor: str = ""
) -> tuple[AudioChunk, ...]:
    """Decode a recording and cut it. `processor` is the digest of the model's settings for media, which is part of ids. Raises `ApiError` 400 for a file that is no audio, or too large or long."""
    if intake is None:
        raise bad_request("This server decodes no media.", param=PARAM)
    item = await _decode(intake, recording, MediaTarget(processor, support.rate_hz))
    places = cuts(item.array(), support.rate_hz, support.window_s)
    return tuple(_chunk(item, begin, end, support.rate_hz) for begin, end in places)


async def _decode(intake: MediaFetcher, recording: AudioRecording, target: MediaTarget) -> MediaItem:
    source = MediaSource.from_bytes("audio", recording.data, PARAM)
    outcome = "cancelled"
    try:
        with metrics.MEDIA_SECONDS.labels("audio").time():
            item = await intake.fetch(source, target=target)
        outcome = "ok"
    except ApiError as error:
        outcome = error.code or "error"
        raise
    finally:
        metrics.MEDIA.labels("audio", outcome).inc()
    return item


def _chunk(item: MediaItem, begin: int, end: int, rate_hz: int) -> AudioChunk:
    width = VALUE_BYTES["recording"]
    data = item.data[begin * width : end * width]
    whole = end - begin == item.shape[0]
    return AudioChunk(
        item.id if whole else _id_of_part(item.id, begin, end),
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
