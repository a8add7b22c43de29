"""Generation's events as transcripts: golden files for each format, and the official client's types as the reader of them.

After a change that is meant: `python -m tests.unit.actors.edge.apis.audio.test_transcripts` writes the files again.
"""

from pathlib import Path
from typing import Any, Final, get_args

import msgspec
import pytest

from headwater.actors.edge.apis.audio import ShownTranscript, TranscriptEncoder, TranscriptFormat, segments_of
from headwater.actors.edge.prompt.request import (
    AudioPlace,
    ChoiceEnd,
    ChoiceResult,
    GenerationResult,
    PromptDetail,
    TokenDetail,
)
from headwater.actors.edge.tokenizer import Tokenizer
from headwater.actors.http.errors import bad_request
from headwater.engines.model_files import byte_tokenizer
from headwater.schemas.inference import TokenLogprob
from headwater.schemas.tables import SpeechSupport
from tests.support.data.generation_events import START, USAGE
from tests.support.marks import OFFICIAL_CLIENT

GOLDEN = Path(__file__).parent / "golden"

TOKENIZER = Tokenizer(byte_tokenizer().to_str().encode())
FIRST: Final = 1_000
SUPPORT = SpeechSupport(
    window_s=30.0,
    rate_hz=16_000,
    start=900,
    previous=901,
    no_timestamps=FIRST - 1,
    first_timestamp=FIRST,
    timestamp_s=0.02,
    prompt_max=8,
)
STOP = ChoiceEnd("stop")


def at(seconds: float) -> int:
    return FIRST + round(seconds * 50)


def said(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.reference.encode(text, add_special_tokens=False).ids)


PIECES = (
    (*said(" Good morning,"), at(1.5), at(1.5), *said(" Zürich --> Bern."), at(4), at(4)),
    # No time at its end, and one beyond the piece.
    (at(0.5), *said(" The end"), at(60), *said(" of it.")),
)
PLACES = (AudioPlace(0.0, 29.5), AudioPlace(29.5, 3_700.25))


def encoder(shown: TranscriptFormat = "json") -> TranscriptEncoder:
    return TranscriptEncoder(TOKENIZER, SUPPORT, ShownTranscript(shown, "transcribe", "en", 0.0))


def detail_of(tokens: tuple[int, ...]) -> TokenDetail:
    return TokenDetail(tokens, tuple(TokenLogprob(-0.5, ()) for _ in tokens))


def result() -> GenerationResult:
    choices = []
    for number, tokens in enumerate(PIECES):
        text = TOKENIZER.reference.decode([token for token in tokens if token < FIRST])
        choices.append(ChoiceResult(number, number, text, "", (), STOP, detail_of(tokens), PromptDetail()))
    return GenerationResult(START, tuple(choices), USAGE, PLACES)


def stream() -> bytes:
    """Two pieces at the same time: the second is faster, and ends first."""
    one = encoder()
    sent = [one.start(START), one.start_choice(0, None), one.start_choice(1, None), one.ping()]
    sent += [one.text(1, " The end", None), one.text(0, " Good", None), one.text(1, " of it.", None)]
    sent += [one.end_choice(1, STOP), one.text(0, " morning.", None), one.end_choice(0, STOP)]
    return b"".join([*sent, one.end(result())])


def events_of(body: bytes) -> list[dict[str, Any]]:
    """The documents of a stream. None marks its end, as OpenAI's has none."""
    return [msgspec.json.decode(part[6:]) for part in body.split(b"\n\n") if part.startswith(b"data: ")]


def transcripts() -> dict[str, str]:
    found = {
        f"{shown}.txt": encoder(shown).encode_result(result()).decode()
        for shown in get_args(TranscriptFormat)
    }
    for name in ("json.txt", "verbose_json.txt"):
        found[name] = msgspec.json.format(found[name]) + "\n"
    found["stream.txt"] = stream().decode()
    found["failed.txt"] = encoder().fail(bad_request("Worker w1 failed.", code="worker_failed")).decode()
    return found


@pytest.mark.parametrize("name", transcripts())
def test_responses_are_the_golden_transcripts(name: str) -> None:
    assert transcripts()[name] == (GOLDEN / name).read_text()


def test_no_transcript_is_left_over() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == set(transcripts())


def test_a_stream_adds_up_to_the_text_in_the_order_of_the_recording() -> None:
    """Whatever piece is faster; every delta is there before its piece ends."""
    *deltas, done = events_of(stream())
    assert [one["delta"] for one in deltas] == ["Good", " morning.", " The end of it."]
    assert done["text"] == "Good morning. The end of it."


@OFFICIAL_CLIENT
def test_the_official_client_reads_them() -> None:
    """Strictly, but for what no engine reports."""
    from openai.types.audio import Transcription, TranscriptionTextDeltaEvent, TranscriptionTextDoneEvent
    from openai.types.audio.transcription_verbose import TranscriptionVerbose

    Transcription.model_validate_json(encoder().encode_result(result()))
    verbose: dict[str, Any] = msgspec.json.decode(encoder("verbose_json").encode_result(result()))
    for one in verbose["segments"]:
        assert one["no_speech_prob"] is None
        one["no_speech_prob"] = 0.0
    assert TranscriptionVerbose.model_validate(verbose).duration == 3_729.75
    *deltas, done = events_of(stream())
    for one in deltas:
        TranscriptionTextDeltaEvent.model_validate(one)
    TranscriptionTextDoneEvent.model_validate(done)


@pytest.mark.parametrize(
    ("tokens", "spans"),
    [
        ((), []),
        ((at(1), at(2)), []),
        (said("a"), [(10.0, 15.0)]),
        ((at(1), *said("a"), at(2), *said("b"), at(3)), [(11.0, 12.0), (12.0, 13.0)]),
        ((at(3), *said("a"), at(2)), [(12.0, 12.0)]),
        ((at(1), *said("a"), at(9)), [(11.0, 15.0)]),
    ],
)
def test_times_begin_and_end_segments(tokens: tuple[int, ...], spans: list[tuple[float, float]]) -> None:
    """Of a piece of five seconds, ten seconds after the begin. None ends before it begins, or after the piece."""

    def decode(ids: Any) -> str:
        return TOKENIZER.reference.decode(list(ids))

    found = segments_of(detail_of(tokens), AudioPlace(10.0, 5.0), SUPPORT, decode)
    assert [(one.start_s, one.end_s) for one in found] == spans
    assert all(one.logprob == -0.5 for one in found)


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for file, text in transcripts().items():
        (GOLDEN / file).write_text(text)
