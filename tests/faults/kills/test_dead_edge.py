"""kill -9 of an edge whose workers compute what only its clients wait for: they stop."""

import asyncio

import httpx
import pytest

from headwater.actors.worker.handoffs import CHECK_PERIOD_S, GONE_S
from tests.support.processes.encode_leg import is_idle
from tests.support.processes.fleet import FleetProcess, shared_fleet

pytestmark = [pytest.mark.processes, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(200)]

SHORT, LONG = [5] * 8, [5] * 240_000
"""Prompts: of milliseconds, and of half a minute."""

LOADED_S = 20.0
"""What a busy machine may add to a time."""


up = shared_fleet(
    *("--engine", "sim", "--workers", "1", "--sim-step-time", "default", "--max-model-len", "300000")
)
"""One worker, with step times of a real engine."""


async def test_vectors_for_nobody_are_not_computed(up: FleetProcess) -> None:
    """The client's connection breaks, the worker is idle soon, and the next edge's requests are answered by it."""
    await up.until_whole(workers=1)
    async with up.client() as client:
        body = {"model": "sim", "input": LONG}
        asked = asyncio.create_task(client.post("/v1/embeddings", json=body))
        await up.until("it computes", lambda stats: any(one.get("running") for one in stats))
        up.kill(" edge ")
        with pytest.raises(httpx.TransportError):
            await asked
    await up.until("no worker computes", is_idle(1), within_s=GONE_S + 3 * CHECK_PERIOD_S + LOADED_S)
    assert '"orphans_aborted"' in up.log.read_text()
    await up.until_whole(workers=1)
    async with up.client() as client:
        reply = await client.post("/v1/embeddings", json={"model": "sim", "input": SHORT})
    assert reply.status_code == 200, reply.text
