"""A client's own embedding in place of an image: vLLM answers as about the image."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from safetensors.numpy import load

from tests.support.clients.media_chat import MediaAnswer, ask, ask_content
from tests.support.clients.pictures import picture_url
from tests.support.engines.multimodal.vision_reference import reference_embeddings
from tests.support.marks import VLLM
from tests.support.media.embeddings import embedding_file, embedding_part
from tests.support.processes.fleet import FleetProcess

pytestmark = [*VLLM, pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(600)]


@pytest_asyncio.fixture(loop_scope="package")
async def client(up: FleetProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's own client, without its retries: an error is seen, not repeated."""
    async with up.official_client() as made:
        yield made


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
