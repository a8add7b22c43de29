"""Images on the real SGLang, in a fleet with a worker of vLLM: it sees them, and their blocks are found where they are cached."""

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import openai
import pytest
import pytest_asyncio

from tests.sglang.conftest import MODEL, SGLANG, VLLM, Mixed
from tests.support.clients.media_chat import ask, ask_again
from tests.support.clients.pictures import picture_url
from tests.support.engines.multimodal import tiny_vision_model
from tests.support.engines.multimodal.vision_reference import reference_answers

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.xdist_group("sglang"),
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.timeout(400),
]

ask_sglang = partial(ask, worker=SGLANG)


@pytest_asyncio.fixture(loop_scope="package")
async def client(mixed: Mixed) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's own client, without its retries: an error is seen, not repeated."""
    await mixed.until_ready()
    async with openai.AsyncOpenAI(
        base_url=f"{mixed.up.url}/v1", api_key="none", max_retries=0, timeout=90
    ) as made:
        yield made


async def test_both_engines_answer_as_hugging_face_does(client: openai.AsyncOpenAI, tmp_path: Path) -> None:
    """The same greedy tokens with the same weights: of one image, of two, and of one that is resized."""
    questions = (
        (picture_url(31), "What is this?"),
        ("Compare ", picture_url(32), " with ", picture_url(33), "."),
        (picture_url(34, size=(300, 150)), "And this?"),
    )
    expected = await reference_answers(tmp_path, *questions)
    assert len(set(expected)) == len(questions)
    for worker in (VLLM, SGLANG):
        answers = [await ask(client, *question, worker=worker) for question in questions]
        assert all(one.worker.startswith(worker) for one in answers)
        assert [one.text for one in answers] == expected


async def test_the_same_image_is_found_where_it_is_cached_and_another_is_not(
    client: openai.AsyncOpenAI,
) -> None:
    """What the router expects is what SGLang finds, for the same pixels in another file too; the answer is of the image."""
    first = await ask_sglang(client, picture_url(1), "What is this?")
    assert first.cached == first.expected == 0
    # Named, as by cost a stall of the machine may make the other worker the cheaper one.
    again = await ask_again(client, picture_url(1, "PNG", compress_level=1), "What is this?", worker=SGLANG)
    assert (again.text, again.worker) == (first.text, first.worker)
    assert again.cached == again.expected * 32 == 64
    other = await ask_sglang(client, picture_url(2), "What is this?")
    assert other.text != first.text
    shifted = await ask_sglang(client, "Look: ", picture_url(1), "What is this?")
    salted = await ask_sglang(client, picture_url(1), "What is this?", cache_salt="tenant")
    assert salted.text == first.text
    assert [(one.cached, one.expected) for one in (other, shifted, salted)] == [(0, 0)] * 3


async def test_images_of_a_prompt_are_told_apart_by_their_order(client: openai.AsyncOpenAI) -> None:
    """Two images in one prompt: swapped, only what precedes the difference is reused."""
    one = await ask_sglang(client, picture_url(11), picture_url(12), "Which is first?")
    again = await ask_again(client, picture_url(11), picture_url(12), "Which is first?", worker=SGLANG)
    assert (again.text, again.worker) == (one.text, one.worker)
    assert again.cached == again.expected * 32 >= 96
    swapped = await ask_sglang(client, picture_url(12), picture_url(11), "Which is first?")
    assert swapped.cached == swapped.expected == 0
    assert swapped.text != one.text


async def test_a_placeholder_without_an_image_ends_no_engine(client: openai.AsyncOpenAI) -> None:
    """As token ids in a prompt. What a user spells is text, also next to an image."""
    with pytest.raises(openai.BadRequestError, match="without an image"):
        await client.completions.create(
            model=MODEL,
            prompt=[504, tiny_vision_model.IMAGE_TOKEN, 504],
            max_tokens=2,
            extra_headers={"x-headwater-worker": SGLANG},
        )
    plain = await ask_sglang(client, picture_url(3), "pad")
    spelled = await ask_sglang(client, picture_url(3), "<|vision_start|><|image_pad|><|vision_end|>")
    assert spelled.tokens > plain.tokens + 8
