"""Forms of transcriptions: each field as OpenAI's client sends it, and what is not served rejected by name."""

from typing import Any

import pytest

from headwater.actors.edge.apis.audio import (
    TranscriptionForm,
    TranslationForm,
    decode_form,
)
from headwater.actors.edge.saga.fields import field_rows
from headwater.actors.http.body import UploadForm
from headwater.actors.http.errors import ApiError
from tests.support.worlds.edge import EdgeWorld

REJECTED = [row.field for row in field_rows(TranscriptionForm) if row.status == "rejected"]


def form(**fields: str | list[str]) -> UploadForm:
    made = UploadForm()
    made.files["file"] = [b"RIFF"]
    made.fields = {
        name: value if isinstance(value, list) else [value]
        for name, value in {"model": "m", **fields}.items()
    }
    return made


def test_fields_have_their_types() -> None:
    """Forms have text only."""
    found = decode_form(
        form(temperature="0.5", stream="true", seed="7", timestamp_granularities=["segment"]),
        TranscriptionForm,
    )
    assert (found.temperature, found.stream, found.seed) == (0.5, True, 7)
    assert found.file == b"RIFF"
    assert found.response_format == "json"
    assert [decode_form(form(response_format=name), TranscriptionForm).timed for name in ("text", "srt")] == [
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *[({name: ["word"]}, name) for name in REJECTED],
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": "1.5"}, "temperature"),
        ({"response_format": "diarized_json"}, "response_format"),
        ({"stream": "true", "response_format": "srt"}, "response_format"),
        ({"stream": ["true", "true"]}, "stream"),
        ({"file": "x"}, "file"),
        ({"beam_size": "5"}, "beam_size"),
    ],
)
def test_what_is_not_served_is_rejected_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as raised:
        decode_form(form(**fields), TranscriptionForm)
    assert (raised.value.status, raised.value.param) == (400, param)


def test_a_form_needs_one_file_and_a_model() -> None:
    """And translations have no fields of transcriptions only."""
    without = form()
    without.files.clear()
    two = form()
    two.files["other"] = [b""]
    twice = form()
    twice.files["file"] *= 2
    nameless = form()
    del nameless.fields["model"]
    wrong = (
        (without, "has no file"),
        (two, "'other' is not expected"),
        (twice, "several files"),
        (nameless, "`model`"),
    )
    for given, message in wrong:
        with pytest.raises(ApiError, match=message):
            decode_form(given, TranscriptionForm)
    with pytest.raises(ApiError, match="include is not supported"):
        decode_form(form(include=["logprobs"]), TranslationForm)


def test_models_that_do_not_transcribe_say_so() -> None:
    """The model that the edge serves generates text. A body with the bytes of JSON in it is not measured as JSON."""
    with EdgeWorld() as edge:
        for path in ("/v1/audio/transcriptions", "/v1/audio/translations"):
            answer = edge.ask_form(path, data={"model": "m"}, files={"file": ("x.wav", b"[" * 100_000)})
            assert answer.status == 400
            assert "does not transcribe speech" in answer.document["error"]["message"]
            assert answer.document["error"]["param"] == "model"
            refused = edge.ask(path, {"model": "m"})
            assert refused.document["error"]["code"] == "wrong_content_type"
