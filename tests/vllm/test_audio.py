"""Audio in chats on real vLLM, with a tiny model of Qwen2-Audio's architecture: heard, cached where it was heard before, and counted.

All of it is of the long form: the model needs an engine of its own. The same path with the simulated engine is always tested.
"""

from collections.abc import AsyncIterator

import openai
import pytest
import pytest_asyncio

from tests.support.clients.media_chat import ask, ask_again, content
from tests.support.engines.multimodal import tiny_audio_model
from tests.support.media.images import data_url
from tests.support.media.recordings import recording, tone, wav
from tests.support.processes.fleet import FleetProcess, fleet

pytestmark = [
    pytest.mark.soak,
    pytest.mark.vllm,
    pytest.mark.xdist_group("vllm"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
]

MODEL = "tiny"
RATE_HZ = 16_000
WRAPPING = 2
"""Tokens that the template puts around a clip."""


def clip(seconds: float, hz: float = 440.0) -> str:
    """A tone as a data URL."""
    return data_url(wav(tone(seconds, RATE_HZ, hz=hz), RATE_HZ), "audio/wav")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hearing(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FleetProcess]:
    """Two workers with the tiny model that hears."""
    flags = ("--engine", "vllm", "--model", str(tiny_audio_model.ensure()), "--served-model-name", MODEL)
    limits = ("--max-model-len", "2048", "--kv-cache-mib", "256", "--client-policies", "kv,direct")
    async with fleet(tmp_path_factory.mktemp("audio"), *flags, *limits, ready_s=240, vllm=True) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def client(hearing: FleetProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's own client, without its retries: an error is seen, not repeated."""
    async with openai.AsyncOpenAI(
        base_url=f"{hearing.url}/v1", api_key="none", max_retries=0, timeout=90
    ) as made:
        yield made


@pytest.mark.parametrize("seconds", [0.0201, 0.06, 1.0, 3.337, 29.9999])
async def test_a_clip_has_as_many_tokens_as_vllm_makes_of_it(
    client: openai.AsyncOpenAI, seconds: float
) -> None:
    """Another count would be rejected by the engine's own check, as its blocks would have wrong names."""
    plain = await ask(client, "What is this?")
    samples = round(seconds * RATE_HZ)
    answer = await ask(client, clip(seconds), "What is this?")
    assert answer.tokens == plain.tokens + (samples + 319) // 640 + WRAPPING


async def test_the_same_audio_is_found_where_it_is_cached_and_other_audio_is_not(
    client: openai.AsyncOpenAI,
) -> None:
    """What the router expects is what the engine finds, for the same samples in another file too; the answer is of what is heard."""
    first = await ask(client, clip(4.0), "What is this?")
    assert first.cached == first.expected == 0
    flac = data_url(recording("flac", "flac", 4.0, RATE_HZ), "audio/flac")
    again = await ask_again(client, flac, "What is this?", worker=first.worker)
    assert again.text == first.text
    assert again.cached == again.expected * 32 >= 96
    other = await ask(client, clip(4.0, hz=660.0), "What is this?")
    assert other.text != first.text
    assert (other.tokens, other.cached, other.expected) == (first.tokens, 0, 0)
    shifted = await ask(client, "Hear: ", clip(4.0), "What is this?")
    assert shifted.cached == shifted.expected == 0
    salted = await ask(client, clip(4.0), "What is this?", cache_salt="tenant")
    assert salted.text == first.text
    assert salted.cached == salted.expected == 0


async def test_clips_of_a_prompt_are_told_apart_by_their_order(client: openai.AsyncOpenAI) -> None:
    """Two in one prompt: swapped, nothing is reused. MP3, as OpenAI's API names it, is heard too."""
    mp3 = data_url(recording("mp3", "libmp3lame", 2.0, RATE_HZ), "audio/mp3")
    one = await ask(client, clip(2.0, hz=330.0), mp3, "Which is first?")
    again = await ask_again(client, clip(2.0, hz=330.0), mp3, "Which is first?", worker=one.worker)
    assert again.text == one.text
    assert again.cached == again.expected * 32 >= 96
    swapped = await ask(client, mp3, clip(2.0, hz=330.0), "Which is first?")
    assert swapped.cached == swapped.expected == 0
    assert swapped.text != one.text


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
