"""A data-parallel rank in a process of its own, as on another machine: `headwater engine vllm -- --headless`."""

import asyncio
from pathlib import Path

import pytest

from headwater.ops.start.sockets import free_port
from tests.support.engines.multimodal import tiny_vision_model
from tests.support.processes import zygote
from tests.support.processes.fleet import fleet

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.xdist_group("vllm"),
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.timeout(300),
    # On a busy machine the two were once not ready within 240 s, for an unknown reason.
    pytest.mark.soak,
]


async def test_a_headless_rank_answers_for_its_leader(tmp_path: Path) -> None:
    """Each rank is a worker of the fleet; both answer, with the same text, and the rank ends when it is told to."""
    flags: tuple[str, ...] = ("--model", str(tiny_vision_model.ensure()), "--served-model-name", "tiny")
    flags += ("--max-model-len", "1024", "--native=--kv-cache-memory-bytes=67108864")
    ranks: tuple[str, ...] = ("--data-parallel-size", "2", "--data-parallel-size-local", "1")
    ranks += ("--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(free_port(0)))
    first = ("--data-parallel-start-rank", "1")
    with (tmp_path / "rank.log").open("wb") as log:
        rank = await zygote.start(
            "engine", "vllm", *flags, "--", *ranks, "--headless", *first, stdout=log, stderr=log, vllm=True
        )
    try:
        leader = (
            "--engine",
            "vllm",
            "--workers",
            "1",
            *flags,
            "--client-policies",
            "kv,direct",
            "--",
            *ranks,
        )
        async with fleet(tmp_path, *leader, ready_s=240, vllm=True) as up, up.client() as client:
            body = {"model": "tiny", "prompt": "One, two,", "max_tokens": 8, "temperature": 0}
            texts = set()
            for worker in ("worker-0-dp0", "worker-0-dp1"):
                headers = {"x-headwater-policy": "direct", "x-headwater-worker": worker}
                answer = await client.post("/v1/completions", json=body, headers=headers)
                assert answer.status_code == 200, answer.text
                assert answer.headers["x-headwater-worker"] == worker
                texts.add(answer.json()["choices"][0]["text"])
            assert len(texts) == 1
    finally:
        rank.terminate()
        async with asyncio.timeout(60):
            await rank.wait()
