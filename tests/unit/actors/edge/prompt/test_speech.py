"""Recordings: where long ones are cut, what the decoder begins with, and that the id of a piece is that of its samples' place."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headwater.actors.edge.admit.control import CacheSalt
from headwater.actors.edge.catalog import Model
from headwater.actors.edge.prompt.prepare import prepare
from headwater.actors.edge.prompt.request import AudioRecording, GenerationRequest
from headwater.actors.edge.prompt.speech import (
    QUIET_S,
    SEARCH_S,
    cuts,
    load_chunks,
    speech_prompt,
)
from headwater.actors.edge.saga.placement import TokenSequence
from headwater.actors.edge.tokenizer import Tokenizer
from headwater.actors.http.errors import ApiError
from headwater.actors.media.intake import MediaIntake
from headwater.engines.model_files import byte_tokenizer
from headwater.schemas.inference import Sampling
from headwater.schemas.media import media_features
from headwater.schemas.tables import SpeechSupport, required_capabilities
from tests.support.media.recordings import tone, wav
from tests.unit.actors.edge.prompt.test_images import CARD

with_intake = pytest.mark.asyncio(loop_scope="module")

ENGLISH = SpeechSupport(
    window_s=3.0,
    rate_hz=8_000,
    start=900,
    previous=901,
    no_timestamps=902,
    first_timestamp=903,
    timestamp_s=0.02,
    prompt_max=5,
)
MANY = replace(ENGLISH, languages={"de": 910, "en": 911}, transcribe=920, translate=921)
RATE_HZ = 100


def model(support: SpeechSupport | None = ENGLISH) -> Model:
    card = replace(CARD, name="whisper", images=None, speech=support, capabilities=("transcription",))
    return Model(card, Tokenizer(byte_tokenizer().to_str().encode()), None)


@given(st.integers(1, 5_000), st.floats(0.02, 10.0), st.integers(0, 2**32))
def test_pieces_follow_each_other_and_none_is_too_long(samples: int, window_s: float, seed: int) -> None:
    """For any recording: nothing is lost, nothing is heard twice, and pieces do not get tiny."""
    noise = np.random.default_rng(seed).normal(size=samples).astype(np.float32)
    found = cuts(noise, RATE_HZ, window_s)
    assert found[0][0] == 0
    assert found[-1][1] == samples
    assert all(before[1] == after[0] for before, after in pairwise(found))
    longest = int(window_s * RATE_HZ)
    assert all(0 < end - begin <= longest for begin, end in found)
    assert all(end - begin >= longest // 2 for begin, end in found[:-1])


def test_cuts_are_where_it_is_quiet() -> None:
    """In the middle of the pause nearest to the end of the piece."""
    loud = np.ones(60 * RATE_HZ, np.float32)
    for pause_s in (28.0, 28.6, 55.0):
        loud[round(pause_s * RATE_HZ) : round((pause_s + QUIET_S) * RATE_HZ)] = 0.0
    first, second, third = cuts(loud, RATE_HZ, 30.0)
    assert first[1] / RATE_HZ == pytest.approx(28.6 + QUIET_S / 2, abs=0.02)
    assert 30.0 - SEARCH_S < second[1] / RATE_HZ - first[1] / RATE_HZ <= 30.0
    assert third[1] == len(loud)


@pytest.mark.parametrize(
    ("support", "recording", "expected"),
    [
        (ENGLISH, AudioRecording(b""), [900, 902]),
        (ENGLISH, AudioRecording(b"", language="en", timestamps=True), [900, 903]),
        (MANY, AudioRecording(b"", language="de"), [900, 910, 920, 902]),
        (MANY, AudioRecording(b"", language="de", translates=True, timestamps=True), [900, 910, 921, 903]),
    ],
)
async def test_the_decoder_begins_with(
    support: SpeechSupport, recording: AudioRecording, expected: list[int]
) -> None:
    """The language and the task, where there are several, and whether times are wanted."""
    found = await speech_prompt(recording, model(support), support)
    assert found.tolist() == expected
    assert found.dtype == np.uint32


async def test_what_was_said_before_precedes_and_is_cut_to_its_last_tokens() -> None:
    """As Whisper reads only the last ones."""
    whole = (await speech_prompt(AudioRecording(b"", prompt=" abc "), model(), ENGLISH)).tolist()
    spelled = model().tokenizer.encode_plain(" abc").tolist()
    assert whole == [901, *spelled, 900, 902]
    cut = (await speech_prompt(AudioRecording(b"", prompt="abcdefghij"), model(), ENGLISH)).tolist()
    assert cut == [901, *model().tokenizer.encode_plain("fghij").tolist(), 900, 902]


@pytest.mark.parametrize(
    ("support", "recording", "message"),
    [
        (ENGLISH, AudioRecording(b"", language="de"), "English only"),
        (ENGLISH, AudioRecording(b"", translates=True), "nothing to translate"),
        (MANY, AudioRecording(b""), "knows 2 languages, and its engine cannot detect"),
        (MANY, AudioRecording(b"", language="xx"), "it knows de, en"),
    ],
)
async def test_languages_that_a_model_does_not_know(
    support: SpeechSupport, recording: AudioRecording, message: str
) -> None:
    with pytest.raises(ApiError, match=message) as raised:
        await speech_prompt(recording, model(support), support)
    assert raised.value.status == 400


@with_intake
async def test_pieces_of_a_recording(intake: MediaIntake) -> None:
    """Their samples are those of the recording, their ids and places differ, and block hashes depend on them."""
    chunks = await load_chunks(AudioRecording(wav(tone(7.0))), ENGLISH, intake)
    again = await load_chunks(AudioRecording(wav(tone(7.0))), ENGLISH, intake)
    (short,) = await load_chunks(AudioRecording(wav(tone(2.0))), ENGLISH, intake)
    with pytest.raises(ApiError) as raised:
        await load_chunks(AudioRecording(b"words"), ENGLISH, intake)
    assert (raised.value.status, raised.value.param, raised.value.code) == (400, "file", "media_unknown_type")
    assert sum(chunk.samples for chunk in chunks) == 7 * ENGLISH.rate_hz
    assert [chunk.begin_s for chunk in chunks] == [
        pytest.approx(sum(before.seconds for before in chunks[:number])) for number in range(len(chunks))
    ]
    assert [chunk.id for chunk in again] == [chunk.id for chunk in chunks]
    assert len({chunk.id for chunk in (*chunks, short)}) == len(chunks) + 1
    for chunk in chunks:
        assert len(chunk.data) == chunk.media(2).size == chunk.samples * 4
    prompt = np.arange(10, dtype=np.uint32)
    hashes = {_hashes(prompt, chunk) for chunk in chunks}
    assert len(hashes) == len(chunks)
    assert _hashes(prompt, chunks[0]) == _hashes(prompt, again[0])


def _hashes(prompt: Any, chunk: Any) -> bytes:
    return TokenSequence(prompt, 4, "", "", (chunk.media(len(prompt)),)).extend([])[1]


def request(recording: AudioRecording | None = None) -> GenerationRequest:
    """As the endpoint makes it; without a recording a request for text."""
    prompts = () if recording is not None else ("hi",)
    return GenerationRequest(model="whisper", param="file", recording=recording, prompts=prompts)


@with_intake
async def test_each_piece_is_a_prompt_and_workers_can_fetch_its_samples(intake: MediaIntake) -> None:
    """Under ids that other tenants do not have: engines keep what they encoded by them."""
    found: list[str] = []
    for salt in ("", "one", "other"):
        recording = AudioRecording(wav(tone(4.0)))
        prepared = await prepare(request(recording), model(), 100, CacheSalt(salt), intake)
        assert len(prepared.prompts) == len(prepared.places) == 2
        assert prepared.sampling.max_tokens == 100 - len(prepared.prompts[0])
        media = [item for place in range(2) for item in prepared.media_of(place)]
        assert [(item.id, item.size) for item in media] == [(id_, len(data)) for id_, data in prepared.held]
        found += [item.id for item in media]
    tiny = model(replace(ENGLISH, window_s=0.02))
    with pytest.raises(ApiError, match="at most 128 fit") as raised:
        await prepare(request(AudioRecording(wav(tone(4.0)))), tiny, 100, intake=intake)
    assert raised.value.code == "media_too_long"
    assert len({*found}) == 6


async def test_a_model_that_only_transcribes_says_where() -> None:
    with pytest.raises(ApiError, match="use /v1/audio/transcriptions") as raised:
        await prepare(request(), model(), 100)
    assert raised.value.param == "model"


@with_intake
async def test_a_recording_needs_an_engine_that_transcribes(intake: MediaIntake) -> None:
    (chunk,) = await load_chunks(AudioRecording(wav(tone(1.0))), ENGLISH, intake)
    assert required_capabilities(Sampling(1), **media_features([chunk.media(2)])) == ("transcription",)
