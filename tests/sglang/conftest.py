"""One fleet with workers of vLLM and SGLang for all tests that need both."""

from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import pytest
import pytest_asyncio

from tests.support.engines.multimodal import tiny_vision_model
from tests.support.processes.fleet import FleetProcess, fleet
from tests.support.processes.restarted import KeptProcess, kept_sglang_worker
from tests.support.sglang.environment import PYTHON

MODEL = "tiny"
FLAGS = ("--served-model-name", MODEL, "--max-model-len", "1024", "--reads-embeddings")
VLLM, SGLANG = "worker-0", "sglang-0"


class Mixed(NamedTuple):
    """The fleet, and the SGLang worker, which is started again when it ends."""

    up: FleetProcess
    sglang: KeptProcess

    async def until_ready(self) -> None:
        """Both workers take requests, whatever the test before did to them."""
        await self.up.until("both workers", lambda stats: ready(stats) == {VLLM, SGLANG}, within_s=240)
        await self.up.until_whole()


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def mixed(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mixed]:
    """A worker of `headwater up` with vLLM; one of SGLang joins it as a process of its own. The model takes images."""
    assert PYTHON.exists(), "SGLang's environment is missing: make sglang"
    folder, model = tmp_path_factory.mktemp("mixed"), str(tiny_vision_model.ensure())
    flags = ("--engine", "vllm", "--model", model, *FLAGS, "--workers", "1", "--kv-cache-mib", "64")
    own = ("--model", model, *FLAGS, "--", "--max-running-requests", "4")
    async with fleet(folder, *flags, "--client-policies", "kv,direct", ready_s=240, vllm=True) as up:
        async with kept_sglang_worker(folder, up.nats, SGLANG, *own) as worker:
            yield Mixed(up, worker)


def ready(stats: list[dict[str, Any]]) -> set[str]:
    """Ids of the workers that take requests."""
    return {one["id"] for one in stats if one["name"] == "headwater-worker" and one.get("state") == "ready"}
