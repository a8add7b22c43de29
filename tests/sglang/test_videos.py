"""Videos on the real SGLang, in a fleet with a worker of vLLM: both see the same, and their blocks are found where they are cached."""

from collections.abc import AsyncIterator
from functools import partial

import openai
import pytest
import pytest_asyncio

from tests.sglang.conftest import SGLANG, VLLM, Mixed
from tests.support.clients.media_chat import ask, ask_again
from tests.support.clients.pictures import picture_url
from tests.support.media.images import data_url
from tests.support.media.recordings import film

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.xdist_group("sglang"),
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.timeout(400),
]

ask_sglang = partial(ask, worker=SGLANG)
TOKENS = 64
"""Of 8 frames of 112 x 112 pixels: one for each square of 28 pixels of two frames."""


def video_url(first: int, frames: int = 8) -> str:
    """A video as a data URL, which begins with this brightness."""
    return data_url(film(frames, size=(112, 112), first=first), "video/mp4")


@pytest_asyncio.fixture(loop_scope="package")
async def client(mixed: Mixed) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's own client, without its retries: an error is seen, not repeated."""
    await mixed.until_ready()
    async with openai.AsyncOpenAI(
        base_url=f"{mixed.up.url}/v1", api_key="none", max_retries=0, timeout=90
    ) as made:
        yield made


async def test_both_engines_see_the_same(client: openai.AsyncOpenAI) -> None:
    """The same greedy tokens with the same weights: of one video, of two of different lengths, of one next to an image, and of one that is sampled."""
    questions = (
        (video_url(31), "What happens?"),
        (video_url(41), " and ", video_url(51, 5), ": which is longer?"),
        (picture_url(41), video_url(61), picture_url(42), "Which was first?"),
        (video_url(71, 50), "What happens?"),
    )
    expected = [await ask(client, *question, worker=VLLM) for question in questions]
    assert len({one.text for one in expected}) == len(questions)
    found = [await ask_sglang(client, *question) for question in questions]
    assert all(one.worker.startswith(SGLANG) for one in found)
    assert [(one.text, one.tokens) for one in found] == [(one.text, one.tokens) for one in expected]


async def test_the_same_video_is_found_where_it_is_cached_and_another_is_not(
    client: openai.AsyncOpenAI,
) -> None:
    """What the router expects is what SGLang finds; another video, tenant or place, or one frame more, are another prompt."""
    plain = await ask_sglang(client, "What happens?")
    first = await ask_sglang(client, video_url(0), "What happens?")
    # The three tokens that the template puts around a video, less its placeholder, which is repeated.
    assert first.tokens == plain.tokens + TOKENS + 2
    assert first.cached == first.expected == 0
    # Named, as by cost a stall of the machine may make the other worker the cheaper one.
    again = await ask_again(client, video_url(0), "What happens?", worker=SGLANG)
    assert (again.text, again.worker) == (first.text, first.worker)
    assert again.cached == again.expected * 32 == 64
    other = await ask_sglang(client, video_url(100), "What happens?")
    assert (other.tokens, other.text != first.text) == (first.tokens, True)
    longer = await ask_sglang(client, video_url(0, 9), "What happens?")
    shifted = await ask_sglang(client, "Look: ", video_url(0), "What happens?")
    salted = await ask_sglang(client, video_url(0), "What happens?", cache_salt="tenant")
    assert salted.text == first.text
    assert [(one.cached, one.expected) for one in (other, longer, shifted, salted)] == [(0, 0)] * 4
