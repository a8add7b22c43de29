"""Audio in chats on the real engines, with a tiny model of Qwen2-Audio's architecture: heard alike, cached where it was heard before, and counted.

All of it is of the long form: the model needs a fleet of its own. The same path with the simulated engine is always tested, and so are
the engines without a fleet, in `tests/vllm/test_audio_answers.py` and in the contract suite.
"""

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import openai
import pytest
import pytest_asyncio

from tests.engines.cases import SGLANG, VLLM, Case
from tests.engines.conftest import MODEL, Mixed
from tests.support.clients.media_chat import ask, ask_again, content
from tests.support.engines.multimodal import tiny_audio_model
from tests.support.engines.multimodal.tiny_audio_model import RATE_HZ
from tests.support.media.images import data_url
from tests.support.media.recordings import recording, tone, wav
from tests.support.processes.fleet import fleet
from tests.support.processes.restarted import kept_sglang_worker

pytestmark = [pytest.mark.soak, pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(600)]

FLAGS = ("--served-model-name", MODEL, "--max-model-len", "2048")
WRAPPING = 2
"""Tokens that the template puts around a clip."""


def clip(seconds: float, hz: float = 440.0) -> str:
    """A tone as a data URL."""
    return data_url(wav(tone(seconds, RATE_HZ, hz=hz), RATE_HZ), "audio/wav")


def tokens_of(seconds: float) -> int:
    """Of a clip, without what the template puts around it."""
    return (round(seconds * RATE_HZ) + 319) // 640


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[openai.AsyncOpenAI]:
    """Of a fleet with a worker of each engine. OpenAI's own client, without its retries: an error is seen, not repeated."""
    folder: Path = tmp_path_factory.mktemp("hearing")
    model = ("--model", str(tiny_audio_model.ensure()), *FLAGS)
    limits = (
        "--workers",
        "1",
        "--native=--kv-cache-memory-bytes=268435456",
        "--client-policies",
        "kv,direct",
    )
    own = ("--", "--max-running-requests", "4")
    async with (
        fleet(folder, "--engine", "vllm", *model, *limits, ready_s=240, vllm=True) as up,
        kept_sglang_worker(folder, up.nats, SGLANG.worker, *model, *own) as worker,
    ):
        await Mixed(up, worker).until_ready()
        async with up.official_client() as made:
            yield made


@pytest.mark.parametrize("seconds", [0.0201, 0.06, 1.0, 3.337, 29.9999])
async def test_a_clip_has_as_many_tokens_as_vllm_makes_of_it(
    client: openai.AsyncOpenAI, case: Case, seconds: float
) -> None:
    """Another count would be rejected by the engine's own check, as its blocks would have wrong names."""
    plain = await ask(client, "What is this?", worker=case.worker)
    answer = await ask(client, clip(seconds), "What is this?", worker=case.worker)
    assert answer.tokens == plain.tokens + tokens_of(seconds) + WRAPPING


async def test_the_same_audio_is_found_where_it_is_cached_and_other_audio_is_not(
    client: openai.AsyncOpenAI, case: Case
) -> None:
    """What the router expects is what the engine finds, for the same samples in another file too; the answer is of what is heard.

    Its tokens count as audio.
    """
    asked = partial(ask, client, worker=case.worker)
    plain = await asked("What is this?")
    first = await asked(clip(4.0), "What is this?")
    assert (first.tokens, first.audio) == (plain.tokens + tokens_of(4.0) + WRAPPING, tokens_of(4.0))
    assert first.cached == first.expected == 0
    flac = data_url(recording("flac", "flac", 4.0, RATE_HZ), "audio/flac")
    again = await ask_again(client, flac, "What is this?", worker=case.worker)
    assert (again.text, again.worker) == (first.text, first.worker)
    assert again.cached == again.expected * 32 >= 96
    other = await asked(clip(4.0, hz=660.0), "What is this?")
    assert (other.tokens, other.text != first.text) == (first.tokens, True)
    shifted = await asked("Hear: ", clip(4.0), "What is this?")
    salted = await asked(clip(4.0), "What is this?", cache_salt="tenant")
    assert salted.text == first.text
    assert [(one.cached, one.expected) for one in (other, shifted, salted)] == [(0, 0)] * 3


async def test_clips_of_a_prompt_are_told_apart_by_their_order(
    client: openai.AsyncOpenAI, case: Case
) -> None:
    """Two in one prompt: swapped, nothing is reused. MP3, as OpenAI's API names it, is heard too."""
    asked = partial(ask, client, worker=case.worker)
    mp3 = data_url(recording("mp3", "libmp3lame", 2.0, RATE_HZ), "audio/mp3")
    one = await asked(clip(2.0, hz=330.0), mp3, "Which is first?")
    again = await ask_again(client, clip(2.0, hz=330.0), mp3, "Which is first?", worker=case.worker)
    assert again.text == one.text
    assert again.cached == again.expected * 32 >= 96
    swapped = await asked(mp3, clip(2.0, hz=330.0), "Which is first?")
    assert swapped.cached == swapped.expected == 0
    assert swapped.text != one.text


async def test_both_engines_hear_a_clip_that_fills_the_window_alike(client: openai.AsyncOpenAI) -> None:
    """The same greedy tokens with the same weights."""
    workers = (VLLM.worker, SGLANG.worker)
    found = [await ask(client, clip(30.0, hz=330.0), "What is this?", worker=one) for one in workers]
    assert found[0].worker != found[1].worker
    assert found[0].text == found[1].text
    assert found[0].audio == found[1].audio == 750


async def test_what_the_model_does_not_hear_is_rejected_by_name(client: openai.AsyncOpenAI) -> None:
    """Longer than it listens, too short for a token, an image, and a placeholder without a clip."""
    for part, code, message in (
        (clip(30.1), "media_too_long", "longer than 30 s"),
        (clip(0.01), "audio_shape", "too short: at least 0.0201 s"),
        ("data:image/png;base64,AAAA", "media_not_taken", "tiny takes text and audio clips"),
    ):
        with pytest.raises(openai.BadRequestError, match=message) as raised:
            await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": content(part)}]
            )
        assert raised.value.code == code
    with pytest.raises(openai.BadRequestError, match="stands for an audio clip, without an audio clip"):
        await client.chat.completions.create(
            model=MODEL, messages=[{"role": "system", "content": "<|AUDIO|>"}], max_tokens=2
        )
