"""What the decoder of a model that transcribes begins with. Pure but for the tokenizer."""

import numpy as np

from headwater.actors.edge.generation.speech.recording import AudioRecording
from headwater.actors.edge.model.catalog import Model
from headwater.actors.http.errors import bad_request
from headwater.schemas.hashing import U32
from headwater.schemas.tables.card import SpeechSupport

ENGLISH = "en"


def require_speech(model: Model) -> SpeechSupport:
    """How the model transcribes. Raises `ApiError` 400 for one that does not."""
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
        known = ", ".join(sorted(support.languages))
        raise bad_request(f"{name} does not know this language; it knows {known}.", param="language")
    token = support.languages[language] if language else next(iter(support.languages.values()))
    return [token, support.translate if recording.translates else support.transcribe]
