"""Generation's events as responses of /v1/audio/transcriptions and translations. Pure."""

import math
from typing import Any

import msgspec

from headwater.actors.edge.api.audio.segments import TranscriptSegment, segments_of, srt, vtt
from headwater.actors.edge.api.audio.types import TranscriptFormat
from headwater.actors.edge.api.openai.chunks import event
from headwater.actors.edge.generation.events import (
    ChoiceEnd,
    GenerationResult,
    GenerationStart,
    PromptDetail,
    TokenDetail,
    TokenUsage,
)
from headwater.actors.edge.model.tokenizer import Tokenizer
from headwater.actors.edge.parsing.events import OutputEvent
from headwater.actors.http.asgi import PING
from headwater.actors.http.errors import ApiError
from headwater.schemas.tables.card import SpeechSupport


class ShownTranscript(msgspec.Struct, frozen=True):
    """What the client asked for. `language`: what is spoken, "" if it is to be detected."""

    format: TranscriptFormat
    task: str
    language: str
    temperature: float


class TranscriptEncoder:
    """See `ResponseEncoder`. The choices are the pieces of the recording; their texts follow each other."""

    wants_progress = False

    def __init__(self, tokenizer: Tokenizer, support: SpeechSupport, shown: ShownTranscript) -> None:
        self._tokenizer = tokenizer
        self._support = support
        self._shown = shown
        self._sent: list[str] = []
        self._sending = 0
        """The first piece that has not ended: only its text is sent, later ones wait."""
        self._waiting: dict[int, list[str]] = {}
        self._ended: set[int] = set()

    def start(self, start: GenerationStart) -> bytes:
        """See `ResponseEncoder.start`."""
        del start
        return b""

    def start_choice(self, index: int, prompt: PromptDetail | None) -> bytes:
        """See `ResponseEncoder.start_choice`."""
        del index, prompt
        return b""

    def text(self, index: int, text: str, detail: TokenDetail | None) -> bytes:
        """See `ResponseEncoder.text`."""
        del detail
        if index != self._sending:
            self._waiting.setdefault(index, []).append(text)
            return b""
        return self._delta(text)

    def _delta(self, text: str) -> bytes:
        if not self._sent:
            # Models begin with a space.
            text = text.lstrip()
        if not text:
            return b""
        self._sent.append(text)
        return event({"type": "transcript.text.delta", "delta": text})

    def delta(self, index: int, event: OutputEvent, detail: TokenDetail | None) -> bytes:
        """See `ResponseEncoder.delta`: transcripts have text only."""
        raise AssertionError(event)

    def progress(self, usage: TokenUsage) -> None:
        """See `ResponseEncoder.progress`: not wanted."""
        raise AssertionError(usage)

    def end_choice(self, index: int, end: ChoiceEnd) -> bytes:
        """See `ResponseEncoder.end_choice`."""
        del end
        self._ended.add(index)
        parts: list[bytes] = []
        while self._sending in self._ended:
            self._sending += 1
            parts.append(self._delta("".join(self._waiting.pop(self._sending, []))))
        return b"".join(parts)

    def end(self, result: GenerationResult) -> bytes:
        """See `ResponseEncoder.end`."""
        usage = result.usage
        tokens = {
            "type": "tokens",
            "input_tokens": usage.prompt_tokens,
            "output_tokens": usage.completion_tokens,
            "total_tokens": usage.total_tokens,
        }
        return event({"type": "transcript.text.done", "text": "".join(self._sent), "usage": tokens})

    def fail(self, error: ApiError) -> bytes:
        """See `ResponseEncoder.fail`."""
        return event(error.document())

    def ping(self) -> bytes:
        """See `ResponseEncoder.ping`."""
        return PING

    def encode_result(self, result: GenerationResult) -> bytes:
        """See `ResponseEncoder.encode_result`."""
        shown = self._shown.format
        if shown == "json":
            text = "".join(choice.text for choice in result.choices).strip()
            return msgspec.json.encode({"text": text, "usage": _usage(result)})
        if shown == "text":
            return "".join(choice.text for choice in result.choices).strip().encode() + b"\n"
        segments = self._segments(result)
        if shown == "srt":
            return srt(segments).encode()
        if shown == "vtt":
            return vtt(segments).encode()
        return msgspec.json.encode(self._verbose(result, segments))

    def _segments(self, result: GenerationResult) -> list[TranscriptSegment]:
        decode = self._tokenizer.reference.decode
        found: list[TranscriptSegment] = []
        for choice, place in zip(result.choices, result.places, strict=True):
            found += segments_of(
                choice.detail, place, self._support, lambda ids: decode(list(ids), skip_special_tokens=True)
            )
        return found

    def _verbose(self, result: GenerationResult, segments: list[TranscriptSegment]) -> dict[str, Any]:
        shown = self._shown
        return {
            "task": shown.task,
            "language": shown.language or result.language,
            "duration": round(_seconds(result), 3),
            "text": "".join(one.text for one in segments).strip(),
            "segments": [
                {
                    "id": number,
                    "seek": round(one.start_s * 100),
                    "start": round(one.start_s, 3),
                    "end": round(one.end_s, 3),
                    "text": one.text,
                    "tokens": one.tokens,
                    "temperature": shown.temperature,
                    "avg_logprob": one.logprob,
                    "compression_ratio": one.compression_ratio,
                    # Engines do not report it.
                    "no_speech_prob": None,
                }
                for number, one in enumerate(segments)
            ],
            "usage": _usage(result),
        }


def _seconds(result: GenerationResult) -> float:
    last = result.places[-1]
    return last.begin_s + last.seconds


def _usage(result: GenerationResult) -> dict[str, Any]:
    return {"type": "duration", "seconds": math.ceil(_seconds(result))}
