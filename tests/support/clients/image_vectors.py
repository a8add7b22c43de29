"""Vectors of texts with images through a fleet that pools with the tiny vision model: what holds for every engine."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from tests.support.clients.media_chat import content
from tests.support.clients.pictures import picture_url
from tests.support.engines.multimodal import tiny_vision_model
from tests.support.engines.multimodal.vision_reference import reference_vectors
from tests.support.media.images import data_url
from tests.support.media.recordings import film
from tests.support.processes.fleet import FleetProcess

FLAGS = ("--served-model-name", "vectors", "--workers", "1", "--max-model-len", "2048")
TOLERANCE = 1e-3
FILMS = ((31, 8), (131, 8), (31, 10))
"""Videos: the brightness that each begins with, and its frames."""
WORDS = "What is this? It is one of many pictures, and nobody has seen it before, nor will anybody again."


async def post(client: httpx.AsyncClient, messages: Any) -> tuple[list[list[float]], str]:
    """The vectors of conversations, and the request's id."""
    response = await client.post("/v1/embeddings", json={"model": "vectors", "messages": messages})
    assert response.status_code == 200, response.text
    return [one["embedding"] for one in response.json()["data"]], response.headers["x-request-id"]


def turn(parts: Sequence[str]) -> list[dict[str, Any]]:
    """A conversation of one message."""
    return [{"role": "user", "content": content(*parts)}]


async def check_vectors(up: FleetProcess, folder: Path) -> None:
    """The same image in another file is the same vector; another image, another order and the text alone are others."""
    prompts = [
        (picture_url(1), WORDS),
        (picture_url(2), WORDS),
        (WORDS, picture_url(1)),
        (picture_url(1), picture_url(2), WORDS),
        (WORDS,),
    ]
    expected = np.array(await reference_vectors(folder, *prompts))
    async with up.client() as client:
        found, _ = await post(client, [turn(parts) for parts in prompts])
        assert np.abs(np.array(found) - expected).max() < TOLERANCE
        apart = [np.abs(one - other).max() for n, one in enumerate(expected) for other in expected[:n]]
        assert min(apart) > 20 * TOLERANCE
        [same], _ = await post(client, turn((picture_url(1, "PNG", compress_level=1), WORDS)))
        assert np.abs(np.array(same) - expected[0]).max() < TOLERANCE
        plain = await client.post("/v1/embeddings", json={"model": "vectors", "input": WORDS})
        assert len(plain.json()["data"][0]["embedding"]) == len(same)


async def check_videos(up: FleetProcess) -> None:
    """The same video is the same vector, next to an image too; another one, of other frames or of one more, is another."""
    videos = [data_url(film(frames, size=(112, 112), first=first), "video/mp4") for first, frames in FILMS]
    prompts = [(videos[0], WORDS), (videos[1], WORDS), (videos[2], WORDS), (videos[0], picture_url(1), WORDS)]
    async with up.client() as client:
        found, _ = await post(client, [turn(parts) for parts in prompts])
        again, _ = await post(client, [turn(parts) for parts in prompts])
    assert np.abs(np.array(found) - np.array(again)).max() < TOLERANCE
    apart = [np.abs(np.subtract(one, other)).max() for n, one in enumerate(found) for other in found[:n]]
    assert min(apart) > 20 * TOLERANCE


async def check_blocks(up: FleetProcess) -> None:
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


async def check_rejections(up: FleetProcess) -> None:
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
