"""POST /v1/audio/transcriptions and /v1/audio/translations."""

from typing import Final

import msgspec

from headwater.actors.edge.api.audio.encoder import ShownTranscript, TranscriptEncoder
from headwater.actors.edge.api.audio.types import TranscriptionForm, TranslationForm, decode_form
from headwater.actors.edge.generation.generate import Generator
from headwater.actors.edge.generation.request import GenerationRequest, Hints, SamplingFields
from headwater.actors.edge.generation.sink import HttpSink
from headwater.actors.edge.generation.speech.prompts import ENGLISH, require_speech
from headwater.actors.edge.generation.speech.recording import AudioRecording
from headwater.actors.edge.request.context import Call, Serving
from headwater.actors.http.asgi import Headers, respond
from headwater.actors.http.form import read_form

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
        model = self._serving.model(form.model, call.principal)
        support = require_speech(model)
        task = "translate" if translates else "transcribe"
        language = form.language or ("" if support.languages else ENGLISH)
        shown = ShownTranscript(form.response_format, task, language, form.temperature)
        encoder = TranscriptEncoder(model.tokenizer, support, shown)
        plain = form.response_format not in ("json", "verbose_json") and not form.stream
        # The log of requests has the fields; a recording is no text.
        call = call._replace(body=_logged(form))
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


def _logged(form: TranslationForm) -> bytes:
    fields = msgspec.structs.asdict(form)
    return msgspec.json.encode({**fields, "file": f"{len(form.file)} bytes"})
