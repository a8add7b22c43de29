"""A form through the whole edge: what workers get, what the client gets in each format, and what is recorded."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from headwater.actors.media.intake import MediaIntake
from headwater.engines.model_files import byte_tokenizer
from headwater.schemas.events import RequestAccepted, RequestEnded
from headwater.schemas.hashing import unpack_tokens
from headwater.schemas.inference import GenerateRequest
from tests.support.media.recordings import tone, wav
from tests.support.worlds.edge import ANSWER, EdgeWorld, Response
from tests.unit.actors.edge.apis.audio.test_transcripts import SUPPORT
from tests.unit.actors.edge.saga.test_record import told

PATH = "/v1/audio/transcriptions"
LONG = wav(tone(7.0))
SHORT = wav(tone(1.0))


@pytest.fixture(scope="module")
def edge() -> Iterator[EdgeWorld]:
    with EdgeWorld(intake=MediaIntake()) as world:
        serve(world)
        yield world


def serve(world: EdgeWorld) -> None:
    """A model that hears three seconds at once."""
    support = msgspec.structs.replace(SUPPORT, window_s=3.0)
    world.serve("whisper", capabilities=frozenset({"transcription", "seed", "logprobs"}), speech=support)


def ask(edge: EdgeWorld, audio: bytes = SHORT, **fields: Any) -> Response:
    edge.given.clear()
    return edge.ask_form(PATH, data={"model": "whisper", **fields}, files={"file": ("a.wav", audio)})


def test_workers_get_samples_by_name_and_the_fields_as_sampling(edge: EdgeWorld) -> None:
    """No samples are in the message: workers fetch them."""
    answer = ask(edge, temperature="0.5", seed="7", prompt="b")
    assert answer.document == {"text": ANSWER, "usage": {"type": "duration", "seconds": 1}}
    (given,) = edge.given
    (item,) = given.media
    assert (item.kind, item.shape, item.data) == ("recording", (16_000,), b"")
    assert (given.sampling.temperature, given.sampling.seed) == (0.5, 7)
    assert given.sampling.max_tokens == edge.context - len(given.tokens) // 4
    ask(edge)
    assert edge.given[0].sampling.temperature == 0


def test_the_pieces_of_a_long_recording_are_one_text(edge: EdgeWorld) -> None:
    """In their order; each piece is a message of its own, with other samples."""
    answer = ask(edge, LONG)
    pieces = [given.media[0] for given in edge.given]
    assert answer.document["text"] == ANSWER * len(pieces)
    assert answer.document["usage"]["seconds"] == 7
    assert sum(piece.shape[0] for piece in pieces) == 7 * SUPPORT.rate_hz
    assert len({piece.id for piece in pieces}) == len(pieces) > 2


@pytest.mark.parametrize(
    ("fields", "kind", "begin"),
    [
        ({"response_format": "text"}, b"text/plain; charset=utf-8", ANSWER + "\n"),
        ({"response_format": "srt"}, b"text/plain; charset=utf-8", "1\n00:00:00,000 --> 00:00:01,000\n"),
        ({"response_format": "vtt"}, b"text/plain; charset=utf-8", "WEBVTT\n\n00:00:00.000"),
        ({"response_format": "verbose_json"}, b"application/json", '{"task":"transcribe","language":"en"'),
        ({"stream": "true"}, b"text/event-stream", 'data: {"type":"transcript.text.delta"'),
        ({"stream": "true", "response_format": "text"}, b"text/event-stream", "data: "),
    ],
)
def test_formats(edge: EdgeWorld, fields: dict[str, Any], kind: bytes, begin: str) -> None:
    answer = ask(edge, **fields)
    assert answer.status == 200
    assert answer.headers[b"content-type"].startswith(kind)
    assert answer.body.decode().startswith(begin)


DETECTED = byte_tokenizer().encode(ANSWER).ids[0]
"""The worker's answer begins with it: as the token of a language."""


@pytest.fixture(scope="module")
def polyglot() -> Iterator[EdgeWorld]:
    """A model that knows two languages, and takes everything for German."""
    with EdgeWorld(intake=MediaIntake()) as world:
        able = frozenset({"transcription", "seed", "logprobs", "allowed_tokens"})
        languages = {"en": 905, "de": DETECTED}
        support = msgspec.structs.replace(
            SUPPORT, window_s=3.0, languages=languages, transcribe=906, translate=907
        )
        world.serve("whisper", capabilities=able, speech=support)
        yield world


def tokens_of(given: GenerateRequest) -> list[int]:
    return [int(token) for token in unpack_tokens(given.tokens)]


def test_a_language_that_is_not_named_is_detected_first(polyglot: EdgeWorld) -> None:
    """From the first piece, in one token; all pieces are then transcribed in it, and the answer says so."""
    answer = ask(polyglot, LONG, response_format="verbose_json")
    assert (answer.status, answer.document["language"]) == (200, "de"), answer.body
    first, *pieces = polyglot.given
    assert (tokens_of(first), first.sampling.max_tokens) == ([SUPPORT.start], 1)
    assert first.sampling.allowed_token_ids == tuple(sorted((905, DETECTED)))
    assert first.media[0].id == pieces[0].media[0].id
    assert {tuple(tokens_of(one)) for one in pieces} == {
        (SUPPORT.start, DETECTED, 906, SUPPORT.first_timestamp)
    }
    assert len({one.request for one in polyglot.given}) == len(polyglot.given) > 3
    streamed = ask(polyglot, stream="true")
    assert streamed.body.decode().count("transcript.text.done") == 1
    assert len(polyglot.given) == 2


def test_a_language_that_is_named_is_not_detected(polyglot: EdgeWorld) -> None:
    """An unknown one is rejected with those that the model knows."""
    answer = ask(polyglot, language="en", response_format="verbose_json")
    assert answer.document["language"] == "en"
    assert [tokens_of(one)[1] for one in polyglot.given] == [905]
    refused = ask(polyglot, language="xx")
    assert (refused.status, refused.document["error"]["param"]) == (400, "language")
    assert "it knows de, en" in refused.document["error"]["message"]
    assert not polyglot.given


def test_a_worker_that_is_lost_while_the_language_is_detected(polyglot: EdgeWorld) -> None:
    """Another attempt detects it; an answer that is no language is an error of the server."""
    polyglot.breaks_after = [0]
    answer = ask(polyglot, response_format="verbose_json")
    assert (answer.status, answer.document["language"]) == (200, "de")
    polyglot.says("x")
    refused = ask(polyglot)
    polyglot.says(ANSWER)
    assert (refused.status, refused.document["error"]["param"]) == (502, "language")
    (accepted, *_, ended) = [
        event for event in told(polyglot.recorded()) if isinstance(event, RequestAccepted | RequestEnded)
    ][-2:]
    assert isinstance(ended, RequestEnded)
    assert (accepted.request, ended.reason) == (ended.request, "error")


def test_files_that_are_no_audio_are_rejected(edge: EdgeWorld) -> None:
    """Before a worker hears of them."""
    answer = ask(edge, b"no audio")
    assert (answer.status, answer.document["error"]["code"]) == (400, "media_unknown_type")
    assert answer.document["error"]["param"] == "file"
    assert not edge.given


def test_the_recording_is_not_recorded() -> None:
    """The fields of the form are, and the size of the file."""
    with EdgeWorld("full", intake=MediaIntake()) as edge:
        serve(edge)
        ask(edge, user="someone")
        accepted = told(edge.recorded())[0]
    assert isinstance(accepted, RequestAccepted)
    assert accepted.endpoint == "transcriptions"
    body = msgspec.json.decode(accepted.body)
    assert (body["user"], body["file"]) == ("someone", f"{len(SHORT)} bytes")
