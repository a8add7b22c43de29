"""One fleet with vLLM for all tests that need no flags or files of their own."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.engines.multimodal import tiny_vision_model
from tests.support.processes.fleet import FleetProcess, fleet

MODEL = "tiny"
FLAGS = (
    "--served-model-name",
    MODEL,
    "--max-model-len",
    "2048",
    "--native=--kv-cache-memory-bytes=268435456",
)


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def up(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FleetProcess]:
    """Two vLLM workers with the tiny model that takes images. A test that kills one waits until it is back."""
    model = str(tiny_vision_model.ensure())
    embeddings = ("--accept-image-embeds",)
    flags = ("--engine", "vllm", "--model", model, *FLAGS, *embeddings, "--client-policies", "kv,direct")
    async with fleet(tmp_path_factory.mktemp("vllm"), *flags, ready_s=240, vllm=True) as made:
        yield made
