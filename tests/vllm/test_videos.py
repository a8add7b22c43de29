"""Videos through the whole system: the real engine sees their frames, and their blocks are found where they are cached."""

from collections.abc import AsyncIterator

import openai
import pytest
import pytest_asyncio

from tests.support.clients.media_chat import ask, ask_again, content
from tests.support.clients.pictures import picture_url
from tests.support.media.images import data_url
from tests.support.media.recordings import film, tone, wav
from tests.support.processes.fleet import FleetProcess

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.xdist_group("vllm"),
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.timeout(300),
]

MODEL = "tiny"
TOKENS = 64
"""Of 8 frames of 112 x 112 pixels: one for each square of 28 pixels of two frames."""


def video_url(first: int, frames: int = 8) -> str:
    """A video as a data URL, which begins with this brightness: another one for each test, as they share a cache."""
    return data_url(film(frames, size=(112, 112), first=first), "video/mp4")


@pytest_asyncio.fixture(loop_scope="package")
async def client(up: FleetProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's own client, without its retries: an error is seen, not repeated."""
    async with openai.AsyncOpenAI(base_url=f"{up.url}/v1", api_key="none", max_retries=0, timeout=90) as made:
        yield made


async def test_the_same_video_is_found_where_it_is_cached_and_another_is_not(
    client: openai.AsyncOpenAI,
) -> None:
    """What the router expects is what the engine finds; one frame more, another tenant or another place are another prompt."""
    plain = await ask(client, "What happens?")
    first = await ask(client, video_url(0), "What happens?")
    # The three tokens that the template puts around a video, less its placeholder, which is repeated.
    assert first.tokens == plain.tokens + TOKENS + 2
    assert first.cached == first.expected == 0
    again = await ask_again(client, video_url(0), "What happens?", worker=first.worker)
    assert again.text == first.text
    assert again.cached == again.expected * 32 == 64
    other = await ask(client, video_url(100), "What happens?")
    assert other.text != first.text
    assert other.tokens == first.tokens
    assert other.cached == other.expected == 0
    longer = await ask(client, video_url(0, 9), "What happens?")
    assert longer.tokens == first.tokens + TOKENS // 4
    assert longer.cached == longer.expected == 0
    shifted = await ask(client, "Look: ", video_url(0), "What happens?")
    assert shifted.cached == shifted.expected == 0
    salted = await ask(client, video_url(0), "What happens?", cache_salt="tenant")
    assert salted.text == first.text
    assert salted.cached == salted.expected == 0


async def test_long_videos_are_sampled_and_stand_next_to_images(client: openai.AsyncOpenAI) -> None:
    """To 32 frames, as vLLM does; a video and an image in one prompt are told apart by their order."""
    plain = await ask(client, "What happens?")
    long = await ask(client, video_url(7, 50), "What happens?")
    assert long.tokens == plain.tokens + 16 * TOKENS // 4 + 2
    one = await ask(client, video_url(50), picture_url(31), "Which is first?")
    other = await ask(client, picture_url(31), video_url(50), "Which is first?")
    assert one.tokens == other.tokens == (await ask(client, "Which is first?")).tokens + TOKENS + 56 + 4
    assert one.text != other.text
    again = await ask_again(client, video_url(50), picture_url(31), "Which is first?", worker=one.worker)
    assert again.cached == again.expected * 32 >= 96


async def test_what_the_model_does_not_take_is_rejected_by_name(client: openai.AsyncOpenAI) -> None:
    """Audio, by what the model takes instead; a picture that is said to be a video; a placeholder without a video."""
    sound = data_url(wav(tone(1.0)), "audio/wav")
    with pytest.raises(openai.BadRequestError, match="tiny takes text, images and videos") as raised:
        await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": content("Listen:", sound)}]
        )
    assert (raised.value.code, raised.value.param) == (
        "media_not_taken",
        "messages[0].content[1].input_audio",
    )
    still = picture_url(1).replace("data:image/png", "data:video/mp4")
    with pytest.raises(openai.BadRequestError) as raised:
        await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": content(still)}]
        )
    assert (raised.value.code, raised.value.param) == ("media_wrong_type", "messages[0].content[0].video_url")
    with pytest.raises(openai.BadRequestError, match="stands for a video, without a video"):
        await client.chat.completions.create(
            model=MODEL, messages=[{"role": "system", "content": "<|video_pad|>"}], max_tokens=2
        )
