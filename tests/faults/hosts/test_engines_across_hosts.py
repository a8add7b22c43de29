"""One engine on two hosts: its leader is the worker, and what computes elsewhere is a part of it."""

import asyncio
from pathlib import Path

import pytest

from tests.faults.hosts.spread import VLLM, Spread, spread
from tests.support.engines import tiny_model
from tests.support.network.hosts import needs_hosts, network
from tests.support.ports.waiting import eventually
from tests.support.processes.disaggregated import body

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.soak,
    pytest.mark.processes,
    pytest.mark.timeout(300),
    needs_hosts,
]

RPC_PORT, MASTER_PORT = 13345, 13346
TOKENS = 8


async def _answers(up: Spread, workers: tuple[str, ...]) -> set[tuple[str, ...]]:
    """The tokens of one prompt, of each of these workers."""
    found = set()
    async with up.client("edge-0") as client:
        for worker in workers:
            headers = {"x-headwater-policy": "direct", "x-headwater-worker": worker}
            reply = await client.post("/v1/completions", json=body(1, TOKENS), headers=headers)
            assert reply.status_code == 200, reply.text
            found.add(tuple(reply.json()["choices"][0]["logprobs"]["tokens"]))
    return found


async def test_a_headless_rank_of_vllm_on_another_host(tmp_path: Path) -> None:
    """It says that it does not reach its leader while that is not there, waits for it, and then answers as a rank of its worker."""
    with network(tmp_path, "alpha", "beta") as net:
        net.shape(round_trip_s=0.01)
        here, there = net.hosts
        async with spread(tmp_path, net, servers=1, workers=0) as up:
            model = ("--model", str(tiny_model.ensure()))
            ranks: tuple[str, ...] = ("--", "--data-parallel-size", "2", "--data-parallel-size-local", "1")
            ranks += ("--data-parallel-address", here.address, "--data-parallel-rpc-port", str(RPC_PORT))
            first = ("--headless", "--data-parallel-start-rank", "1")
            up.keep(there, "rank", "engine", *VLLM, *model, *ranks, *first, vllm=True)
            log = tmp_path / "rank.log"
            await eventually(lambda: log.exists() and "leader_not_reached" in log.read_text(), within_s=60)
            up.keep(here, "worker-0", "engine", *VLLM, *model, *ranks, vllm=True)
            pool = await up.vllm_pool()
            up.route(here, "router-tiny", pool)
            await up.until_healthy(2)
            assert len(await _answers(up, ("worker-0-dp0", "worker-0-dp1"))) == 1


async def test_a_further_node_of_vllm_on_another_host(tmp_path: Path) -> None:
    """Half of the model's tensors each; the tokens are those of one process."""
    with network(tmp_path, "alpha", "beta") as net:
        here, there = net.hosts
        async with spread(tmp_path, net, servers=1, workers=0) as up:
            model = ("--model", str(tiny_model.ensure()))
            up.keep(here, "alone", "engine", *VLLM, *model, vllm=True)
            nodes: tuple[str, ...] = ("--", "--tensor-parallel-size", "2", "--nnodes", "2")
            nodes += ("--master-addr", here.address, "--master-port", str(MASTER_PORT), "--node-rank")
            up.keep(there, "node", "engine", *VLLM, *model, *nodes, "1", vllm=True)
            up.keep(here, "worker-0", "engine", *VLLM, *model, *nodes, "0", vllm=True)
            pool = await up.vllm_pool()
            up.route(here, "router-tiny", pool)
            async with asyncio.timeout(200):
                await up.until_healthy(2, within_s=200)
            assert len(await _answers(up, ("alone", "worker-0"))) == 1
