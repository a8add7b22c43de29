"""The engines, and one fleet with a worker of each for all tests that need both, or no flags of their own."""

from collections.abc import AsyncIterator
from itertools import chain, groupby
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
import pytest_asyncio

from tests.engines.cases import SGLANG, VLLM, Case
from tests.support.engines.multimodal import tiny_vision_model
from tests.support.processes.fleet import FleetProcess, fleet
from tests.support.processes.restarted import KeptProcess, kept_sglang_worker
from tests.support.sglang.environment import PYTHON

FOLDER = Path(__file__).parent
MODEL = "tiny"
FLAGS = ("--served-model-name", MODEL, "--max-model-len", "1024", "--embeddings", "read=true")


class Mixed(NamedTuple):
    """The fleet, and the SGLang worker, which is started again when it ends."""

    up: FleetProcess
    sglang: KeptProcess

    async def until_ready(self) -> None:
        """Both workers take requests, whatever the test before did to them."""
        both = {VLLM.worker, SGLANG.worker}
        await self.up.until("both workers", lambda stats: ready(stats) == both, within_s=240)
        await self.up.until_whole()


@pytest.fixture(scope="module", params=[VLLM.param(), SGLANG.param()])
def case(request: pytest.FixtureRequest) -> Case:
    """Each engine."""
    made: Case = request.param
    return made


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def mixed(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mixed]:
    """A worker of `headwater up` with vLLM; one of SGLang joins it as a process of its own. The model takes images."""
    assert PYTHON.exists(), "SGLang's environment is missing: make sglang"
    folder, model = tmp_path_factory.mktemp("mixed"), str(tiny_vision_model.ensure())
    flags = (
        "--engine",
        "vllm",
        "--model",
        model,
        *FLAGS,
        "--workers",
        "1",
        "--native=--kv-cache-memory-bytes=67108864",
    )
    own = ("--model", model, *FLAGS, "--", "--max-running-requests", "4")
    async with fleet(folder, *flags, "--client-policies", "kv,direct", ready_s=240, vllm=True) as up:
        async with kept_sglang_worker(folder, up.nats, SGLANG.worker, *own) as worker:
            yield Mixed(up, worker)


@pytest_asyncio.fixture(loop_scope="package")
async def client(mixed: Mixed) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's own client of the fleet of both engines, without its retries: an error is seen, not repeated."""
    await mixed.until_ready()
    async with mixed.up.official_client() as made:
        yield made


def ready(stats: list[dict[str, Any]]) -> set[str]:
    """Ids of the workers that take requests."""
    return {one["id"] for one in stats if one["name"] == "headwater-worker" and one.get("state") == "ready"}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of a module with one engine run one after the other: they share a fleet.

    Pytest has grouped them by the numbers of their parameters, by which it cannot tell the only one of a list from the first of another.
    """

    def engine(item: pytest.Item) -> str:
        spec = getattr(item, "callspec", None)
        return spec.params["case"].engine if spec is not None and "case" in spec.params else ""

    modules = [list(run) for _, run in groupby(items, lambda item: item.path)]
    items[:] = chain.from_iterable(
        sorted(run, key=engine, reverse=True) if FOLDER in run[0].path.parents else run for run in modules
    )
