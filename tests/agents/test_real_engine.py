"""Each agent once on vLLM: a model that computes, whatever it says. Agents offer tools, so the model has a known format of calls."""

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.agents.agents import AGENTS, Agent
from tests.agents.stage import Stage, staged
from tests.support.engines import tiny_model
from tests.support.processes.fleet import FleetProcess, fleet

pytestmark = [
    pytest.mark.soak,
    pytest.mark.processes,
    pytest.mark.timeout(500),
    pytest.mark.asyncio(loop_scope="module"),
]

CONTEXT = 65_536
"""Claude Code's first prompt has about 31,000 tokens of this model's tokenizer; the model was made for 8,192."""

NAMES = ",".join(sorted({one.models for one in AGENTS}))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def up(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FleetProcess]:
    """A fleet whose model has the context that agents need: its answers are as random as before."""
    folder = tmp_path_factory.mktemp("agents-vllm")
    made = folder / "model"
    shutil.copytree(tiny_model.ensure(), made)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}))
    flags: tuple[str, ...] = (
        "--engine",
        "vllm",
        "--model",
        str(made),
        "--max-model-len",
        str(CONTEXT),
        "--kv-cache-mib",
        "1024",
    )
    flags += ("--tool-parser", "hermes", "--model-aliases", NAMES)
    async with fleet(folder, *flags, ready_s=240, vllm=True) as running:
        yield running


@pytest.mark.parametrize("agent", AGENTS, ids=[one.name for one in AGENTS])
async def test_an_agent_on_a_real_engine(tmp_path: Path, up: FleetProcess, agent: Agent) -> None:
    """Two turns of a conversation: every request is answered."""
    async with staged(tmp_path, up) as on:
        await greet(on, agent)


async def greet(on: Stage, agent: Agent) -> None:
    """Say something, and go on. `staged` checks the answers."""
    await on.run(*agent.task, "Say hi.")
    before = len(on.recorder.generated)
    assert before
    await on.run(*agent.resume, "Say hi again.")
    assert len(on.recorder.generated) > before
