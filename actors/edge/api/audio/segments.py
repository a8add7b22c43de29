"""Segments of a transcript, from tokens for text and for times; SRT and WebVTT of them. Pure."""

import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from headwater.actors.edge.generation.events import AudioPlace, TokenDetail
from headwater.schemas.tables.card import SpeechSupport


class TranscriptSegment(NamedTuple):
    """What is said from `start_s` to `end_s`, counted from the recording's begin. `logprob` is the mean over its `tokens`."""

    start_s: float
    end_s: float
    text: str
    tokens: tuple[int, ...]
    logprob: float

    @property
    def compression_ratio(self) -> float:
        """Size of the text to its size when compressed: high where a model repeats itself."""
        data = self.text.encode()
        return len(data) / len(zlib.compress(data))


def segments_of(
    detail: TokenDetail, place: AudioPlace, support: SpeechSupport, decode: Callable[[Sequence[int]], str]
) -> list[TranscriptSegment]:
    """The segments of one piece. A time ends the text before it, and begins the text after it.

    Text without a time at its end lasts to the end of the piece. Segments without text are left out.
    """
    found: list[TranscriptSegment] = []
    start_s, tokens, logprobs = 0.0, list[int](), list[float]()

    def close(end_s: float) -> None:
        text = decode(tokens)
        if text.strip():
            mean = sum(logprobs) / len(logprobs) if logprobs else 0.0
            begin_s = min(start_s, end_s)
            found.append(
                TranscriptSegment(place.begin_s + begin_s, place.begin_s + end_s, text, tuple(tokens), mean)
            )

    for number, token in enumerate(detail.tokens):
        if token < support.first_timestamp:
            tokens.append(token)
            if number < len(detail.logprobs):
                logprobs.append(detail.logprobs[number].logprob)
            continue
        now_s = min((token - support.first_timestamp) * support.timestamp_s, place.seconds)
        close(now_s)
        start_s, tokens, logprobs = now_s, [], []
    close(place.seconds)
    return found


def srt(segments: Sequence[TranscriptSegment]) -> str:
    """As SubRip."""
    blocks = [
        f"{number}\n{_time(one.start_s, ',')} --> {_time(one.end_s, ',')}\n{one.text.strip()}\n"
        for number, one in enumerate(segments, 1)
    ]
    return "\n".join(blocks)


def vtt(segments: Sequence[TranscriptSegment]) -> str:
    """As WebVTT."""
    blocks = [
        f"{_time(one.start_s, '.')} --> {_time(one.end_s, '.')}\n{one.text.strip().replace('-->', '->')}\n"
        for one in segments
    ]
    return "\n".join(["WEBVTT\n", *blocks])


def _time(seconds: float, point: str) -> str:
    ms = round(seconds * 1000)
    return f"{ms // 3_600_000:02}:{ms // 60_000 % 60:02}:{ms // 1000 % 60:02}{point}{ms % 1000:03}"
