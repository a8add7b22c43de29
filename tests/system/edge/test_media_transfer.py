"""Decoded images from the edge to a worker's process over NIXL or in shared memory, and in pieces where that fails."""

import json
from pathlib import Path

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from tests.support.clients.sim_images import answer_about, question_about
from tests.support.media.images import data_url, encoded
from tests.support.processes.fleet import FleetProcess, fleet

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

SHAPE = (644, 700, 3)
"""1.35 MB: more than one message has."""

FLAGS = ("--engine", "sim", "--workers", "1", "--sim-step-time", "zero")


def image(seed: int, shape: tuple[int, ...] = SHAPE) -> NDArray[np.uint8]:
    """Noise."""
    return np.random.default_rng(seed).integers(0, 255, shape, dtype=np.uint8)


async def ask(up: FleetProcess, pixels: NDArray[np.uint8]) -> None:
    """Ask about an image; the answer is that of its pixels."""
    url = data_url(encoded(Image.fromarray(pixels), "PNG", compress_level=1))
    async with up.client() as client:
        reply = await client.post("/v1/chat/completions", json=question_about(url, before="what is it?"))
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["message"]["content"] == answer_about(pixels)


async def loads(up: FleetProcess) -> dict[str, int]:
    """How many items came from where, by the worker's metrics."""
    targets = json.loads(Path(up.log.parent, "data", "prometheus-targets.json").read_text())
    found: dict[str, int] = {}
    async with httpx.AsyncClient() as client:
        for target in targets:
            for address in target["targets"]:
                for line in (await client.get(f"http://{address}/metrics")).text.splitlines():
                    if line.startswith("headwater_worker_media_loads_total{"):
                        source = line.partition('source="')[2].partition('"')[0]
                        found[source] = found.get(source, 0) + int(float(line.rpartition(" ")[2]))
    return {source: count for source, count in found.items() if count}


@pytest.mark.parametrize("transport", ["nixl", pytest.param("shared", marks=pytest.mark.soak)])
async def test_large_images_are_read_from_the_edge(tmp_path: Path, transport: str) -> None:
    """And kept; a small one comes in a piece. The answer is that of the pixels.

    In every run both transports keep the contract of `tests/contract/transfer`.
    """
    transfer = ("--media-transfer", transport, "--media-transfer-mib", "16")
    async with fleet(tmp_path, *FLAGS, *transfer) as up:
        for seed in (1, 2, 3):
            await ask(up, image(seed))
        await ask(up, image(2))
        assert await loads(up) == {"offer": 3, "cache": 1}
        await ask(up, image(4, (56, 56, 3)))
        assert await loads(up) == {"offer": 3, "cache": 1, "edge": 1}
