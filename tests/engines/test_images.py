"""Images on the real engines, in a fleet with a worker of each: they see them, and their blocks are found where they are cached."""

from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.engines.cases import SGLANG, VLLM, Case
from tests.engines.conftest import MODEL, Mixed
from tests.support.clients.media_chat import MediaAnswer, ask, ask_again, ask_content
from tests.support.clients.pictures import picture_url
from tests.support.engines.multimodal import tiny_vision_model
from tests.support.engines.multimodal.vision_reference import reference_answers

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(600)]

TOKENS = 56
"""Of an image of 224 x 196 pixels: one for each square of 28 pixels."""


async def test_both_engines_answer_as_hugging_face_does(client: openai.AsyncOpenAI, tmp_path: Path) -> None:
    """The same greedy tokens with the same weights: of one image, of two, and of one that is resized."""
    questions = (
        (picture_url(31), "What is this?"),
        ("Compare ", picture_url(32), " with ", picture_url(33), "."),
        (picture_url(34, size=(300, 150)), "And this?"),
    )
    expected = await reference_answers(tmp_path, *questions)
    assert len(set(expected)) == len(questions)
    for worker in (VLLM.worker, SGLANG.worker):
        answers = [await ask(client, *question, worker=worker) for question in questions]
        assert all(one.worker.startswith(worker) for one in answers)
        assert [one.text for one in answers] == expected


async def test_the_same_image_is_found_where_it_is_cached_and_another_is_not(
    client: openai.AsyncOpenAI, case: Case
) -> None:
    """What the router expects is what the engine finds, for the same pixels in another file too; the answer is of the image."""
    asked = partial(ask, client, worker=case.worker)
    plain = await asked("What is this?")
    first = await asked(picture_url(1), "What is this?")
    # The three tokens that the template puts around an image, less its placeholder, which is repeated.
    assert first.tokens == plain.tokens + TOKENS + 2
    assert first.cached == first.expected == 0
    again = await ask_again(
        client, picture_url(1, "PNG", compress_level=1), "What is this?", worker=case.worker
    )
    assert (again.text, again.worker) == (first.text, first.worker)
    assert again.cached == again.expected * 32 == 64
    other = await asked(picture_url(2), "What is this?")
    assert other.text != first.text
    shifted = await asked("Look: ", picture_url(1), "What is this?")
    salted = await asked(picture_url(1), "What is this?", cache_salt="tenant")
    assert salted.text == first.text
    assert [(one.cached, one.expected) for one in (other, shifted, salted)] == [(0, 0)] * 3


async def test_a_name_that_a_client_gives_an_image_is_discarded(
    client: openai.AsyncOpenAI, case: Case
) -> None:
    """VLLM's own server takes the `uuid` of a part for the image: another image with the same one would get its KV."""

    async def ask_named(number: int) -> MediaAnswer:
        named = {"type": "image_url", "image_url": {"url": picture_url(number)}, "uuid": "mine"}
        parts = [named, {"type": "text", "text": "What is this?"}]
        return await ask_content(client, parts, worker=case.worker)

    one, other = await ask_named(71), await ask_named(72)
    assert one.text != other.text
    assert other.cached == other.expected == 0


async def test_images_of_a_prompt_are_told_apart_by_their_order(
    client: openai.AsyncOpenAI, case: Case
) -> None:
    """Two images in one prompt: swapped, only what precedes the difference is reused."""
    asked, question = partial(ask, client, worker=case.worker), "Which is first?"
    one = await asked(picture_url(11), picture_url(12), question)
    again = await ask_again(client, picture_url(11), picture_url(12), question, worker=case.worker)
    assert (again.text, again.worker) == (one.text, one.worker)
    assert again.cached == again.expected * 32 >= 96
    swapped = await asked(picture_url(12), picture_url(11), question)
    assert swapped.cached == swapped.expected == 0
    assert swapped.text != one.text


async def test_images_come_through_every_api(client: openai.AsyncOpenAI, mixed: Mixed, case: Case) -> None:
    """Anthropic's base64 source and the Responses API's `input_image` are the same prompt."""
    chat = await ask(client, picture_url(21), "What is this?", worker=case.worker, ignore_eos=False)
    assert chat.text
    response = await client.responses.create(
        model=MODEL,
        temperature=0,
        max_output_tokens=8,
        store=False,
        extra_headers={"x-headwater-worker": case.worker},
        input=[
            {
                "role": "user",
                "content": [
                    {"type": "input_image", "image_url": picture_url(21), "detail": "auto"},
                    {"type": "input_text", "text": "What is this?"},
                ],
            }
        ],
    )
    assert response.output_text == chat.text
    assert response.usage is not None
    assert response.usage.input_tokens == chat.tokens
    import anthropic

    async with anthropic.AsyncAnthropic(base_url=mixed.up.url, api_key="none", max_retries=0) as made:
        source: Any = {"type": "base64", "media_type": "image/png", "data": picture_url(21).partition(",")[2]}
        message = await made.messages.create(
            model=MODEL,
            max_tokens=8,
            extra_body={"temperature": 0},
            extra_headers={"x-headwater-worker": case.worker},
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "source": source},
                        {"type": "text", "text": "What is this?"},
                    ],
                }
            ],
        )
    assert message.content[0].type == "text"
    assert message.content[0].text == chat.text


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("data:image/png;base64,aGVsbG8=", "media_unknown_type"),
        ("http://images.example/x.png", "media_scheme_not_allowed"),
        ("https://127.0.0.1/x.png", "media_private_address"),
    ],
)
async def test_what_is_no_image_is_rejected_by_name(client: openai.AsyncOpenAI, url: str, code: str) -> None:
    """Before an engine sees anything; the error names the part."""
    messages: list[Any] = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    with pytest.raises(openai.BadRequestError) as raised:
        await client.chat.completions.create(model=MODEL, messages=messages)
    assert raised.value.code == code
    assert raised.value.param == "messages[0].content[0].image_url"


async def test_a_placeholder_without_an_image_ends_no_engine(client: openai.AsyncOpenAI, case: Case) -> None:
    """As token ids in a prompt, and spelled in a message of the system, where control tokens count."""
    to_it = {"x-headwater-worker": case.worker}
    with pytest.raises(openai.BadRequestError, match="without an image"):
        await client.completions.create(
            model=MODEL, prompt=[504, tiny_vision_model.IMAGE_TOKEN, 504], max_tokens=2, extra_headers=to_it
        )
    with pytest.raises(openai.BadRequestError, match="without an image"):
        await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "system", "content": "<|image_pad|>"}],
            max_tokens=2,
            extra_headers=to_it,
        )
    # What a user spells is text, also next to an image.
    answer = await ask(client, "<|image_pad|>", worker=case.worker)
    assert answer.tokens > 8
    plain = await ask(client, picture_url(3), "pad", worker=case.worker)
    spelled = "<|vision_start|><|image_pad|><|vision_end|>"
    assert (await ask(client, picture_url(3), spelled, worker=case.worker)).tokens > plain.tokens + 8
