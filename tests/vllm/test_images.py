"""Images through the whole system: the real engine sees them, and their blocks are found where they are cached."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from safetensors.numpy import load

from tests.support.clients.media_chat import MediaAnswer, ask, ask_again, ask_content
from tests.support.clients.pictures import picture_url
from tests.support.engines.multimodal import tiny_vision_model
from tests.support.engines.multimodal.vision_reference import reference_embeddings
from tests.support.media.embeddings import embedding_file, embedding_part
from tests.support.processes.fleet import FleetProcess

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.xdist_group("vllm"),
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.timeout(600),
]

MODEL = "tiny"
TOKENS = 56
"""Of an image of 224 x 196 pixels: one for each square of 28 pixels."""


@pytest_asyncio.fixture(loop_scope="package")
async def client(up: FleetProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's own client, without its retries: an error is seen, not repeated."""
    async with openai.AsyncOpenAI(base_url=f"{up.url}/v1", api_key="none", max_retries=0, timeout=90) as made:
        yield made


async def test_the_same_image_is_found_where_it_is_cached_and_another_is_not(
    client: openai.AsyncOpenAI,
) -> None:
    """What the router expects is what the engine finds, for the same pixels in another file too; the answer is of the image."""
    plain = await ask(client, "What is this?")
    first = await ask(client, picture_url(1), "What is this?")
    # The three tokens that the template puts around an image, less its placeholder, which is repeated.
    assert first.tokens == plain.tokens + TOKENS + 2
    assert first.cached == first.expected == 0
    # Named, as by cost a stall of the machine may make the other worker the cheaper one.
    again = await ask_again(
        client, picture_url(1, "PNG", compress_level=1), "What is this?", worker=first.worker
    )
    assert again.text == first.text
    assert again.cached == 64
    assert again.expected == 2
    other = await ask(client, picture_url(2), "What is this?")
    assert other.text != first.text
    assert other.cached == other.expected == 0
    shifted = await ask(client, "Look: ", picture_url(1), "What is this?")
    assert shifted.cached == shifted.expected == 0
    salted = await ask(client, picture_url(1), "What is this?", cache_salt="tenant")
    assert salted.text == first.text
    assert salted.cached == salted.expected == 0


async def test_a_name_that_a_client_gives_an_image_is_discarded(client: openai.AsyncOpenAI) -> None:
    """VLLM's own server takes the `uuid` of a part for the image: another image with the same one would get its KV."""

    async def ask_named(number: int) -> MediaAnswer:
        named = {"type": "image_url", "image_url": {"url": picture_url(number)}, "uuid": "mine"}
        return await ask_content(client, [named, {"type": "text", "text": "What is this?"}])

    one, other = await ask_named(71), await ask_named(72)
    assert one.text != other.text
    assert other.cached == other.expected == 0


async def test_images_of_a_prompt_are_told_apart_by_their_order(client: openai.AsyncOpenAI) -> None:
    """Two images in one prompt: swapped, only what precedes the difference is reused."""
    one = await ask(client, picture_url(11), picture_url(12), "Which is first?")
    again = await ask_again(client, picture_url(11), picture_url(12), "Which is first?", worker=one.worker)
    assert again.cached == again.expected * 32 >= 96
    swapped = await ask(client, picture_url(12), picture_url(11), "Which is first?")
    assert swapped.cached == swapped.expected == 0
    assert swapped.text != one.text


async def test_an_embedding_in_place_of_its_image_gives_the_same_answer(
    client: openai.AsyncOpenAI, tmp_path: Path
) -> None:
    """Computed by Hugging Face's implementation: equal answers, blocks of its own that are found again, and errors before the engine."""

    async def ask_of(file: bytes, **more: Any) -> MediaAnswer:
        content = [embedding_part(file), {"type": "text", "text": "What is this?"}]
        return await ask_content(client, content, **more)

    one, other = await reference_embeddings(tmp_path, picture_url(61), picture_url(62))
    for number, file in ((61, one), (62, other)):
        seen = await ask(client, picture_url(number), "What is this?")
        given = await ask_of(file)
        assert (given.text, given.tokens) == (seen.text, seen.tokens)
        assert given.cached == given.expected == 0
    again = await ask_of(one)
    async with asyncio.timeout(30):
        while not again.expected:
            again = await ask_of(one)
    assert again.cached == 64
    tensors = load(one)
    for rows in (tensors["image_embeds"][:-1], tensors["image_embeds"][:, :-1]):
        with pytest.raises(openai.BadRequestError):
            await ask_of(embedding_file(rows, tuple(tensors["image_grid_thw"].tolist())))


async def test_images_come_through_every_api(client: openai.AsyncOpenAI, up: FleetProcess) -> None:
    """Anthropic's base64 source and the Responses API's `input_image` are the same prompt."""
    chat = await ask(client, picture_url(21), "What is this?", ignore_eos=False)
    assert chat.text
    response = await client.responses.create(
        model=MODEL,
        temperature=0,
        max_output_tokens=8,
        store=False,
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

    async with anthropic.AsyncAnthropic(base_url=up.url, api_key="none", max_retries=0) as made:
        source: Any = {
            "type": "base64",
            "media_type": "image/png",
            "data": picture_url(21).partition(",")[2],
        }
        message = await made.messages.create(
            model=MODEL,
            max_tokens=8,
            extra_body={"temperature": 0},
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
    messages: list[Any] = [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]},
    ]
    with pytest.raises(openai.BadRequestError) as raised:
        await client.chat.completions.create(model=MODEL, messages=messages)
    assert raised.value.code == code
    assert raised.value.param == "messages[0].content[0].image_url"


async def test_a_placeholder_without_an_image_ends_no_engine(client: openai.AsyncOpenAI) -> None:
    """As token ids in a prompt, and spelled in a message of the system, where control tokens count."""
    with pytest.raises(openai.BadRequestError, match="without an image"):
        await client.completions.create(
            model=MODEL, prompt=[504, tiny_vision_model.IMAGE_TOKEN, 504], max_tokens=2
        )
    with pytest.raises(openai.BadRequestError, match="without an image"):
        await client.chat.completions.create(
            model=MODEL, messages=[{"role": "system", "content": "<|image_pad|>"}], max_tokens=2
        )
    # What a user spells is text.
    answer = await ask(client, "<|image_pad|>")
    assert answer.tokens > 8
