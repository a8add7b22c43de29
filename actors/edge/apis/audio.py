"""POST /v1/audio/transcriptions and /v1/audio/translations: forms, segments, responses and endpoints."""

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar

import msgspec

from headwater.actors.edge.answer.choice import HttpSink, ResponseEncoder
from headwater.actors.edge.answer.run import Generator
from headwater.actors.edge.apis.chat_encoder import event
from headwater.actors.edge.apis.chat_types import Priority, Seed
from headwater.actors.edge.apis.file_types import converted, form_values
from headwater.actors.edge.prompt.request import (
    AudioPlace,
    AudioRecording,
    ChoiceEnd,
    GenerationRequest,
    GenerationResult,
    Hints,
    SamplingFields,
    TokenDetail,
)
from headwater.actors.edge.prompt.speech import ENGLISH, require_speech
from headwater.actors.edge.saga.fields import refuse_rejected, rejected
from headwater.actors.edge.saga.http_call import Call, Serving
from headwater.actors.edge.tokenizer import Tokenizer
from headwater.actors.http.asgi import Headers, respond
from headwater.actors.http.body import FORM, UploadForm, read_form
from headwater.actors.http.errors import bad_request
from headwater.schemas.tables import SpeechSupport

TranscriptFormat = Literal["json", "text", "srt", "verbose_json", "vtt"]

TIMED: Final = ("srt", "verbose_json", "vtt")
"""Formats with the times of segments."""

PROMPT_CHARACTERS_MAX: Final = 16_384

AudioFile = Annotated[bytes, msgspec.Meta(extra_json_schema={"contentEncoding": "binary"})]
Temperature = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Language = Annotated[str, msgspec.Meta(max_length=16)]
NoWords = Annotated[list[str], rejected([])]
SaidBefore = Annotated[str, msgspec.Meta(max_length=PROMPT_CHARACTERS_MAX)]


class TranslationForm(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A recording, and how its transcript is wanted."""

    file: AudioFile
    model: str
    language: Language = ""
    prompt: SaidBefore = ""
    response_format: TranscriptFormat = "json"
    temperature: Temperature = 0.0
    stream: bool = False
    seed: Seed | None = None
    user: str | None = None
    priority: Priority | None = None

    @property
    def timed(self) -> bool:
        """True if the transcript has the times of its segments."""
        return self.response_format in TIMED


class TranscriptionForm(TranslationForm, forbid_unknown_fields=True, kw_only=True):
    """The same with fields that only transcriptions have."""

    timestamp_granularities: Annotated[list[str], rejected(["segment"])] = []
    chunking_strategy: Annotated[str, rejected("auto", "")] = "auto"
    include: NoWords = []
    keywords: NoWords = []
    languages: NoWords = []
    known_speaker_names: NoWords = []
    known_speaker_references: NoWords = []


LISTS: Final = frozenset(TranscriptionForm.__annotations__) - {"chunking_strategy"}

FormT = TypeVar("FormT", bound=TranslationForm)


def decode_form(form: UploadForm, kind: type[FormT]) -> FormT:
    """A form as its type. Raises `ApiError` 400 naming the field."""
    field_names = {field.name for field in msgspec.structs.fields(kind)}
    values = form_values(form.fields, field_names, files=("file",), lists=LISTS)
    for name in form.files:
        if name != "file":
            raise bad_request(f"The file {name[:64]!r} is not expected; the recording is 'file'.", param=name)
    if "file" not in form.files:
        raise bad_request("The form has no file.", param="file")
    if len(form.files["file"]) > 1:
        raise bad_request("The form has several files; the recording is one.", param="file")
    read = converted({**values, "file": form.files["file"][0]}, kind)
    if isinstance(read, TranscriptionForm):
        refuse_rejected(read, "{field} {value} is not supported; leave it out.")
    if read.stream and read.response_format not in ("json", "text"):
        raise bad_request(
            f"{read.response_format} cannot be streamed; use json or text.", param="response_format"
        )
    return read


# Segments of a transcript, from tokens for text and for times, and their formats SRT and WebVTT.


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
    segments: list[TranscriptSegment] = []
    start_s, tokens, logprobs = 0.0, list[int](), list[float]()

    def close(end_s: float) -> None:
        text = decode(tokens)
        if text.strip():
            mean = sum(logprobs) / len(logprobs) if logprobs else 0.0
            begin_s = min(start_s, end_s)
            segments.append(
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
    return segments


def srt(segments: Sequence[TranscriptSegment]) -> str:
    """Return the segments in the SubRip format."""
    blocks = [
        f"{number}\n{_time(segment.start_s, ',')} --> {_time(segment.end_s, ',')}\n{segment.text.strip()}\n"
        for number, segment in enumerate(segments, 1)
    ]
    return "\n".join(blocks)


def vtt(segments: Sequence[TranscriptSegment]) -> str:
    """Return the segments in the WebVTT format."""
    blocks = [
        f"{_time(segment.start_s, '.')} --> {_time(segment.end_s, '.')}\n{segment.text.strip().replace('-->', '->')}\n"
        for segment in segments
    ]
    return "\n".join(["WEBVTT\n", *blocks])


def _time(seconds: float, point: str) -> str:
    ms = round(seconds * 1000)
    return f"{ms // 3_600_000:02}:{ms // 60_000 % 60:02}:{ms // 1000 % 60:02}{point}{ms % 1000:03}"


# Generation's events as responses.


class ShownTranscript(msgspec.Struct, frozen=True):
    """What the client asked for. `language`: what is spoken, "" if it must be detected."""

    format: TranscriptFormat
    task: str
    language: str
    temperature: float


class TranscriptEncoder(ResponseEncoder):
    """See `ResponseEncoder`. The choices are the pieces of the recording; their texts follow each other."""

    def __init__(self, tokenizer: Tokenizer, support: SpeechSupport, shown: ShownTranscript) -> None:
        self._tokenizer = tokenizer
        self._support = support
        self._shown = shown
        self._sent: list[str] = []
        self._sending = 0
        """The first piece that has not ended: only its text is sent, later ones wait."""
        self._waiting: dict[int, list[str]] = {}
        self._ended: set[int] = set()

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
        segments: list[TranscriptSegment] = []
        for choice, place in zip(result.choices, result.places, strict=True):
            segments += segments_of(
                choice.detail, place, self._support, lambda ids: decode(list(ids), skip_special_tokens=True)
            )
        return segments

    def _verbose(self, result: GenerationResult, segments: list[TranscriptSegment]) -> dict[str, Any]:
        shown = self._shown
        return {
            "task": shown.task,
            "language": shown.language or result.language,
            "duration": round(_seconds(result), 3),
            "text": "".join(segment.text for segment in segments).strip(),
            "segments": [
                {
                    "id": number,
                    "seek": round(segment.start_s * 100),
                    "start": round(segment.start_s, 3),
                    "end": round(segment.end_s, 3),
                    "text": segment.text,
                    "tokens": segment.tokens,
                    "temperature": shown.temperature,
                    "avg_logprob": segment.logprob,
                    "compression_ratio": segment.compression_ratio,
                    # Engines do not report it.
                    "no_speech_prob": None,
                }
                for number, segment in enumerate(segments)
            ],
            "usage": _usage(result),
        }


def _seconds(result: GenerationResult) -> float:
    last = result.places[-1]
    return last.begin_s + last.seconds


def _usage(result: GenerationResult) -> dict[str, Any]:
    return {"type": "duration", "seconds": math.ceil(_seconds(result))}


# The endpoints.

TRANSCRIPTIONS: Final = "/v1/audio/transcriptions"
TRANSLATIONS: Final = "/v1/audio/translations"

FORMS: Final = frozenset({TRANSCRIPTIONS, TRANSLATIONS})
"""Paths whose body is a form."""


class TextSink(HttpSink):
    """A response in plain text."""

    async def respond(self, body: bytes, headers: Headers) -> None:
        """See `ByteSink.respond`."""
        await respond(self._send, 200, body, headers, b"text/plain; charset=utf-8")


class AudioApi:
    """The endpoints that transcribe."""

    def __init__(self, serving: Serving, generator: Generator) -> None:
        self._serving = serving
        self._generator = generator

    async def transcribe(self, call: Call) -> None:
        """POST /v1/audio/transcriptions."""
        form = decode_form(await read_form(call.headers, call.body), TranscriptionForm)
        await self._run(form, call, translates=False)

    async def translate(self, call: Call) -> None:
        """POST /v1/audio/translations: into English."""
        form = decode_form(await read_form(call.headers, call.body), TranslationForm)
        await self._run(form, call, translates=True)

    async def _run(self, form: TranslationForm, call: Call, *, translates: bool) -> None:
        model = self._serving.model(form.model, call)
        support = require_speech(model)
        task = "translate" if translates else "transcribe"
        language = form.language or ("" if support.languages else ENGLISH)
        shown = ShownTranscript(form.response_format, task, language, form.temperature)
        encoder = TranscriptEncoder(model.tokenizer, support, shown)
        plain = form.response_format not in ("json", "verbose_json") and not form.stream
        # The log of requests has the fields; a recording is no text.
        fields = {**msgspec.structs.asdict(form), "file": f"{len(form.file)} bytes"}
        call = call._replace(body=msgspec.json.encode(fields))
        request = _request(form, task, translates=translates)
        await self._generator.run(request, encoder, call, TextSink(call.send) if plain else None)


def _request(form: TranslationForm, task: str, *, translates: bool) -> GenerationRequest:
    recording = AudioRecording(
        form.file, form.language, translates=translates, prompt=form.prompt, timestamps=form.timed
    )
    return GenerationRequest(
        model=form.model,
        param="file",
        endpoint="translations" if translates else "transcriptions",
        id_prefix=f"{task}-",
        recording=recording,
        sampling=SamplingFields(
            temperature=form.temperature, seed=form.seed, logprobs=0 if form.timed else None
        ),
        return_token_ids=form.timed,
        stream=form.stream,
        hints=Hints(user=form.user, priority=form.priority),
    )


__all__ = [
    "FORM",
    "TranscriptFormat",
    "TranscriptionForm",
    "TranslationForm",
    "decode_form",
]
