"""Videos on the real engines, in a fleet with a worker of each: both see the same, and their blocks are found where they are cached."""

from functools import partial

import openai
import pytest

from tests.engines.cases import SGLANG, VLLM, Case
from tests.engines.conftest import MODEL
from tests.support.clients.media_chat import ask, ask_again, content
from tests.support.clients.pictures import picture_url
from tests.support.media.images import data_url
from tests.support.media.recordings import film, tone, wav

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(400)]

TOKENS = 64
"""Of 8 frames of 112 x 112 pixels: one for each square of 28 pixels of two frames."""


def video_url(first: int, frames: int = 8) -> str:
    """A video as a data URL, which begins with this brightness: another one for each test, as they share a cache."""
    return data_url(film(frames, size=(112, 112), first=first), "video/mp4")


async def test_both_engines_see_the_same(client: openai.AsyncOpenAI) -> None:
    """The same greedy tokens with the same weights: of one video, of two of different lengths, of one next to an image, and of one that is sampled."""
    questions = (
        (video_url(31), "What happens?"),
        (video_url(41), " and ", video_url(51, 5), ": which is longer?"),
        (picture_url(41), video_url(61), picture_url(42), "Which was first?"),
        (video_url(71, 50), "What happens?"),
    )
    expected = [await ask(client, *question, worker=VLLM.worker) for question in questions]
    assert len({one.text for one in expected}) == len(questions)
    found = [await ask(client, *question, worker=SGLANG.worker) for question in questions]
    assert all(one.worker.startswith(SGLANG.worker) for one in found)
    assert [(one.text, one.tokens) for one in found] == [(one.text, one.tokens) for one in expected]


async def test_the_same_video_is_found_where_it_is_cached_and_another_is_not(
    client: openai.AsyncOpenAI, case: Case
) -> None:
    """What the router expects is what the engine finds; another video, tenant or place, or one frame more, are another prompt."""
    asked = partial(ask, client, worker=case.worker)
    plain = await asked("What happens?")
    first = await asked(video_url(0), "What happens?")
    # The three tokens that the template puts around a video, less its placeholder, which is repeated.
    assert first.tokens == plain.tokens + TOKENS + 2
    assert first.cached == first.expected == 0
    again = await ask_again(client, video_url(0), "What happens?", worker=case.worker)
    assert (again.text, again.worker) == (first.text, first.worker)
    assert again.cached == again.expected * 32 == 64
    other = await asked(video_url(100), "What happens?")
    assert (other.tokens, other.text != first.text) == (first.tokens, True)
    longer = await asked(video_url(0, 9), "What happens?")
    assert longer.tokens == first.tokens + TOKENS // 4
    shifted = await asked("Look: ", video_url(0), "What happens?")
    salted = await asked(video_url(0), "What happens?", cache_salt="tenant")
    assert salted.text == first.text
    assert [(one.cached, one.expected) for one in (other, longer, shifted, salted)] == [(0, 0)] * 4


async def test_long_videos_are_sampled_and_stand_next_to_images(
    client: openai.AsyncOpenAI, case: Case
) -> None:
    """To 32 frames, as vLLM does; a video and an image in one prompt are told apart by their order."""
    asked = partial(ask, client, worker=case.worker)
    plain = await asked("What happens?")
    long = await asked(video_url(7, 50), "What happens?")
    assert long.tokens == plain.tokens + 16 * TOKENS // 4 + 2
    one = await asked(video_url(50), picture_url(31), "Which is first?")
    other = await asked(picture_url(31), video_url(50), "Which is first?")
    assert one.tokens == other.tokens == (await asked("Which is first?")).tokens + TOKENS + 56 + 4
    assert one.text != other.text
    again = await ask_again(client, video_url(50), picture_url(31), "Which is first?", worker=case.worker)
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
