"""Decoded images from an edge to a worker on another host."""

from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.faults.hosts.spread import SIM_POOL, Spread, spread
from tests.support.clients.sim_images import answer_about, question_about
from tests.support.media.images import data_url, encoded
from tests.support.network.hosts import needs_hosts, network

pytestmark = [pytest.mark.soak, pytest.mark.processes, pytest.mark.timeout(180), needs_hosts]

SHAPE = (644, 700, 3)
"""1.35 MB: more than one message has."""

METRICS = 9100
TRANSFER = ("--media-transfer", "nixl", "--media-transfer-mib", "16")
LOADS = "headwater_worker_media_loads_total{"


async def _ask(up: Spread, seed: int) -> None:
    """Ask the first host's edge about an image; the answer is that of its pixels."""
    pixels = np.random.default_rng(seed).integers(0, 255, SHAPE, dtype=np.uint8)
    url = data_url(encoded(Image.fromarray(pixels), "PNG", compress_level=1))
    async with up.client("edge-0") as client:
        reply = await client.post("/v1/chat/completions", json=question_about(url, before="what is it?"))
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["message"]["content"] == answer_about(pixels)


async def _sources(url: str) -> set[str]:
    """Where items came from, by the worker's metrics."""
    async with httpx.AsyncClient() as client:
        lines = (await client.get(url)).text.splitlines()
    counted = [line for line in lines if line.startswith(LOADS) and float(line.rpartition(" ")[2])]
    return {line.partition('source="')[2].partition('"')[0] for line in counted}


@pytest.mark.parametrize(
    ("devices", "sources"),
    [
        pytest.param("eth0", {"offer"}, id="reached"),
        pytest.param("lo", {"offer_failed", "edge"}, id="not reached"),
    ],
)
async def test_images_cross_hosts_by_nixl_or_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: str, sources: set[str]
) -> None:
    """Over UCX where it offers a way to the edge, and through NATS where it offers only loopback; the answer is the same."""
    monkeypatch.setenv("UCX_NET_DEVICES", devices)
    with network(tmp_path, "alpha", "beta") as net:
        there = net.hosts[1]
        async with spread(tmp_path, net, servers=1, workers=0, edge=TRANSFER) as up:
            metrics = ("--metrics-host", there.address, "--metrics-port", str(METRICS))
            up.keep(there, "worker-0", "engine", "--engine", "sim", "--workers", "1", *TRANSFER, *metrics)
            up.route(there, "router-0", SIM_POOL)
            await up.until_healthy(1)
            await _ask(up, 1)
            assert await _sources(f"http://{there.address}:{METRICS}/metrics") == sources
