"""One engine on two hosts: its leader is the worker, and what computes elsewhere is a part of it."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import pytest

from tests.faults.hosts.spread import MODEL, SGLANG, VLLM, Spread, spread
from tests.support.engines import tiny_model
from tests.support.network.hosts import Host, needs_hosts, network
from tests.support.ports.waiting import eventually
from tests.support.processes.disaggregated import body
from tests.support.processes.fleet import stream_text
from tests.support.processes.restarted import KeptProcess

pytestmark = [pytest.mark.soak, pytest.mark.processes, pytest.mark.timeout(600), needs_hosts]

RPC_PORT, LEADER_PORT = 13345, 13346
TOKENS, STREAM_TOKENS = 8, 400
CHUNKS = 5
"""The node dies after so many pieces of an answer."""

READY_S = 300


class Nodes(NamedTuple):
    """An engine whose tensors are on two hosts: flags of its worker, and those of each node but for its number."""

    engine: Literal["vllm", "sglang"]
    worker: tuple[str, ...]
    node: tuple[str, ...]


NODES = (
    Nodes(
        "vllm",
        VLLM,
        ("--tensor-parallel-size=2", "--nnodes=2", "--master-addr=alpha", f"--master-port={LEADER_PORT}"),
    ),
    Nodes("sglang", SGLANG, ("--tp-size=2", "--nnodes=2", f"--dist-init-addr=alpha:{LEADER_PORT}")),
)


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


def _said(log: Path, event: str) -> list[str]:
    """The lines of an event in a log."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [line for line in lines if f'"{event}"' in line]


@pytest.mark.vllm
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
            rank = up.keep(there, "rank", "engine", *VLLM, *model, *ranks, *first, imported="vllm")
            await eventually(lambda: bool(_said(rank.log, "leader_not_reached")), within_s=60)
            up.keep(here, "worker-0", "engine", *VLLM, *model, *ranks, imported="vllm")
            pool = await up.engine_pool()
            up.route(here, "router-tiny", pool)
            await up.until_healthy(2)
            assert len(await _answers(up, ("worker-0-dp0", "worker-0-dp1"))) == 1


async def _control(up: Spread, *words: str) -> None:
    code, output = await up.network.hosts[0].finish("ctl", *words, *up.access)
    assert code == 0, output


async def _streamed(up: Spread, on_text: Callable[[int], None] | None = None, worker: str = "") -> str:
    """A long answer, by this worker if one is named."""
    asked = [{"role": "user", "content": "What is a river?"}]
    given = {
        "model": MODEL,
        "messages": asked,
        "max_tokens": STREAM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    async with up.client("edge-0") as client:
        if worker:
            client.headers.update({"x-headwater-policy": "direct", "x-headwater-worker": worker})
        text, _, usage = await stream_text(client, given, on_text)
    assert usage["completion_tokens"] == STREAM_TOKENS
    return text


class Pair(NamedTuple):
    """A worker whose engine is on two hosts, the further node, and beside them a worker of one process, `alone`."""

    up: Spread
    worker: KeptProcess
    node: KeptProcess

    async def whole(self) -> None:
        """Both workers are there, and answer alike."""
        await self.up.until_healthy(2, within_s=READY_S)
        assert len(await _answers(self.up, ("alone", self.worker.name))) == 1

    async def dead(self, times: int, cause: str) -> None:
        """The worker has died so many times, the last time for this cause."""
        await eventually(lambda: len(_said(self.worker.log, "actor_ended")) == times, within_s=60)
        assert cause in _said(self.worker.log, "actor_ended")[-1]

    async def interrupted(self, strike: Callable[[], None]) -> None:
        """`strike` in the middle of its answer: that goes on elsewhere, and is the one of a single process."""
        edge, resumed = self.up.folder / "edge-0.log", []
        migrated = len(_said(edge, "request_migrated"))
        await _control(self.up, "alone", "drain")

        def on_text(chunks: int) -> None:
            if chunks == CHUNKS:
                strike()
                resumed.append(asyncio.create_task(_control(self.up, "alone", "resume")))

        assert await _streamed(self.up, on_text) == await _streamed(self.up, worker="alone")
        assert len(resumed) == 1
        assert len(_said(edge, "request_migrated")) == migrated + 1


@pytest.mark.parametrize(
    "nodes", [pytest.param(one, id=one.engine, marks=getattr(pytest.mark, one.engine)) for one in NODES]
)
async def test_a_further_node_on_another_host(tmp_path: Path, nodes: Nodes) -> None:
    """Half of the model's tensors each; the tokens are those of one process.

    A node that is killed, cut off, or ended while there is no answer takes its worker with it, and both come back.
    """
    with network(tmp_path, "alpha", "beta") as net:
        here, there = net.hosts
        async with spread(tmp_path, net, servers=1, workers=0) as up:

            def keep(host: Host, name: str, *own: str) -> KeptProcess:
                flags = (*nodes.worker, "--model", str(tiny_model.ensure()), *own)
                return up.keep(host, name, "engine", *flags, imported=nodes.engine)

            node = keep(there, "node", "--", *nodes.node, "--node-rank=1")
            await eventually(lambda: bool(_said(node.log, "leader_not_reached")), within_s=READY_S)
            keep(here, "alone")
            worker = keep(here, "worker-0", "--health=stuck_s=10", "--", *nodes.node, "--node-rank=0")
            up.route(here, "router-tiny", await up.engine_pool())
            pair = Pair(up, worker, node)
            await pair.whole()

            await pair.interrupted(lambda: os.kill(node.pid, signal.SIGKILL))
            await pair.dead(1, "by peer")
            await pair.whole()

            # No connection is closed: only that nothing comes shows it.
            await pair.interrupted(lambda: net.isolate(there))
            await pair.dead(2, "the engine is stuck")
            net.heal()
            await pair.whole()

            await node.restart()
            await pair.dead(3, "by peer")
            await pair.whole()
