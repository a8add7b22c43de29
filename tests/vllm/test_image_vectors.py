"""Vectors of texts with images on real vLLM: those of Hugging Face's implementation with the same weights."""

import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio

from tests.support.clients.media_chat import content
from tests.support.clients.pictures import picture_url
from tests.support.engines.multimodal import tiny_vision_model
from tests.support.engines.multimodal.vision_reference import reference_vectors
from tests.support.processes.fleet import FleetProcess, fleet

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.xdist_group("vllm"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]

TOLERANCE = 1e-3
WORDS = "What is this? It is one of many pictures, and nobody has seen it before, nor will anybody again."


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def up(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FleetProcess]:
    """A worker that pools with the tiny vision model."""
    model = ("--model", str(tiny_vision_model.ensure()), "--served-model-name", "vectors")
    more = ("--engine", "vllm", "--workers", "1", "--max-model-len", "2048", "--kv-cache-mib", "64")
    native = ("--", "--runner", "pooling", "--convert", "embed")
    async with fleet(
        tmp_path_factory.mktemp("vectors"), *model, *more, *native, ready_s=240, vllm=True
    ) as made:
        yield made


async def post(client: httpx.AsyncClient, messages: Any) -> tuple[list[list[float]], str]:
    """The vectors of conversations, and the request's id."""
    response = await client.post("/v1/embeddings", json={"model": "vectors", "messages": messages})
    assert response.status_code == 200, response.text
    return [one["embedding"] for one in response.json()["data"]], response.headers["x-request-id"]


def turn(parts: Sequence[str]) -> list[dict[str, Any]]:
    """A conversation of one message."""
    return [{"role": "user", "content": content(*parts)}]


async def test_vectors_are_those_of_the_image_and_the_text(up: FleetProcess, tmp_path: Path) -> None:
    """The same image in another file is the same vector; another image, another order and the text alone are others."""
    prompts = [
        (picture_url(1), WORDS),
        (picture_url(2), WORDS),
        (WORDS, picture_url(1)),
        (picture_url(1), picture_url(2), WORDS),
        (WORDS,),
    ]
    expected = np.array(await reference_vectors(tmp_path, *prompts))
    async with up.client() as client:
        found, _ = await post(client, [turn(parts) for parts in prompts])
        assert np.abs(np.array(found) - expected).max() < TOLERANCE
        apart = [np.abs(one - other).max() for n, one in enumerate(expected) for other in expected[:n]]
        assert min(apart) > 20 * TOLERANCE
        [same], _ = await post(client, turn((picture_url(1, "PNG", compress_level=1), WORDS)))
        assert np.abs(np.array(same) - expected[0]).max() < TOLERANCE
        plain = await client.post("/v1/embeddings", json={"model": "vectors", "input": WORDS})
        assert len(plain.json()["data"][0]["embedding"]) == len(same)


async def test_blocks_are_found_by_their_image(up: FleetProcess) -> None:
    """What the worker has cached of an image counts when the next request is placed; another image's does not."""

    async def cached(*parts: str) -> int:
        async with up.client() as client:
            _, request = await post(client, turn(parts))
        code, shown = await up.command("explain", f"{request}-0-1")
        assert code == 0, shown
        [found] = re.findall(r"->\s+worker-0\s+(\d+) of \d+", shown)
        return int(found)

    before = await up.blocks()
    assert await cached(picture_url(31), WORDS) == 0
    await up.until_indexed(before + 2)
    assert await cached(picture_url(31), WORDS) >= 2
    assert await cached(picture_url(32), WORDS) == 0


async def test_what_it_cannot_pool_ends_no_engine(up: FleetProcess) -> None:
    """A place without an image, as a token id and spelled in a text; and a file that is no image."""
    async with up.client() as client:
        for given in ({"input": [504, tiny_vision_model.IMAGE_TOKEN, 504]}, {"input": "<|image_pad|>"}):
            response = await client.post("/v1/embeddings", json={"model": "vectors", **given})
            assert response.status_code == 400
            assert "without an image" in response.json()["error"]["message"]
        response = await client.post(
            "/v1/embeddings",
            json={"model": "vectors", "messages": turn(("data:image/png;base64,aGVsbG8=", WORDS))},
        )
        assert response.json()["error"]["code"] == "media_unknown_type"
        assert len((await post(client, turn((WORDS,))))[0]) == 1
