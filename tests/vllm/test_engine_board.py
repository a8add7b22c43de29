"""The boards of engines and of latency, on a Prometheus that scraped vLLM."""

import asyncio
from pathlib import Path

import pytest

from headwater.ops.monitoring.files import write_files
from tests.support.engines import tiny_model
from tests.support.processes.fleet import fleet
from tests.support.servers.prometheus import board_queries, prometheus, until

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm"), pytest.mark.timeout(600)]


@pytest.mark.soak
async def test_every_query_about_engines_has_an_answer(tmp_path: Path) -> None:
    """VLLM's metrics under the names that all engines share. Its processes are executed: see `test_native_arguments`."""
    flags = (
        "--engine",
        "vllm",
        "--model",
        str(tiny_model.ensure()),
        "--workers",
        "1",
        "--native=--kv-cache-memory-bytes=67108864",
    )
    # Queries about the queue of the router need more load than this fleet has.
    async with (
        fleet(tmp_path, *flags, "--served-model-name", "tiny", ready_s=240) as up,
        up.client() as client,
    ):
        write_files(tmp_path / "monitoring", tmp_path / "data", 1)
        written = [
            *board_queries(tmp_path / "monitoring", "engine"),
            *board_queries(tmp_path / "monitoring", "latency"),
        ]
        queries = [expr for expr in written if "router_queue" not in expr]
        assert any("preemptions" in expr for expr in queries)

        async def ask() -> None:
            for number in range(100_000):
                prompt = f"{number % 3} Where does a river begin? " * 20
                answer = await client.post(
                    "/v1/completions", json={"model": "tiny", "prompt": prompt, "max_tokens": 20}
                )
                assert answer.status_code == 200, answer.text

        async with prometheus(tmp_path, tmp_path / "monitoring" / "prometheus.yml") as server:
            asking = asyncio.create_task(ask())
            await until(lambda: server.unanswered(queries), lambda left: not left)
            assert not asking.done()
            asking.cancel()
