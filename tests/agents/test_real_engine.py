"""Each agent once on vLLM: a model that computes, whatever it says. Agents offer tools, so the model has a known format of calls.

On the trained model, which `headwater up` has by default, the agents' first prompts take minutes on two cores, so its tests run on demand:

    OMP_NUM_THREADS=2 AGENTS_TRAINED=1 pytest -m soak tests/agents/test_real_engine.py -k trained
"""

import json
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio

from headwater.ops.start import model
from tests.agents.agents import AGENTS, BRIEF, Agent
from tests.agents.stage import PATIENT_S, Stage, staged
from tests.support.engines import tiny_model
from tests.support.processes.fleet import FleetProcess, fleet

TRAINED: Final = bool(os.environ.get("AGENTS_TRAINED"))
MODELS: Final = ("tiny", "trained") if TRAINED else ("tiny",)

pytestmark = [
    pytest.mark.soak,
    pytest.mark.processes,
    pytest.mark.timeout(3 * PATIENT_S if TRAINED else 500),
    pytest.mark.asyncio(loop_scope="module"),
]

CONTEXT: Final = 40_960
"""Qwen Code's first prompt has about 30,000 tokens of these models' tokenizers; the models were made for 8,192."""

FLAGS: Final = {
    "tiny": ("--native=--kv-cache-memory-bytes=1073741824"),
    "trained": ("--native=--kv-cache-memory-bytes=2147483648", "--workers", "1", "--health", "stuck_s=0"),
}
"""A long prompt takes the trained model longer than the time without a token after which an engine counts as dead."""

NAMES: Final = ",".join(sorted({one.models for one in AGENTS}))


def tiny(folder: Path) -> None:
    """A model whose answers are random, in this context as before."""
    shutil.copytree(tiny_model.ensure(), folder)
    _configure(folder / "config.json", max_position_embeddings=CONTEXT)


def trained(folder: Path) -> None:
    """A model whose rotations are stretched to the context. Agents that do not limit answers get short ones."""
    shutil.copytree(model.ensure(), folder)
    config = folder / "config.json"
    made_for = json.loads(config.read_text())["max_position_embeddings"]
    stretched = {
        "rope_type": "yarn",
        "rope_theta": json.loads(config.read_text())["rope_parameters"]["rope_theta"],
        "factor": CONTEXT / made_for,
        "original_max_position_embeddings": made_for,
    }
    _configure(config, max_position_embeddings=CONTEXT, rope_parameters=stretched)
    _configure(folder / "generation_config.json", max_new_tokens=BRIEF)


def _configure(path: Path, **settings: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


@pytest.fixture(scope="module", params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    """The model's."""
    return str(request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def up(name: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FleetProcess]:
    """A fleet whose model has the context that agents need."""
    folder = tmp_path_factory.mktemp("agents-vllm")
    made = folder / "model"
    {"tiny": tiny, "trained": trained}[name](made)
    flags: tuple[str, ...] = ("--engine", "vllm", "--model", str(made), *FLAGS[name])
    flags += ("--tool-parser", "hermes", "--model-aliases", NAMES)
    async with fleet(folder, *flags, ready_s=240, vllm=True) as running:
        yield running


@pytest.mark.parametrize("agent", AGENTS, ids=[one.name for one in AGENTS])
async def test_an_agent_on_a_real_engine(tmp_path: Path, up: FleetProcess, name: str, agent: Agent) -> None:
    """Two turns of a conversation: every request is answered."""
    async with staged(tmp_path, up, patient=name == "trained") as on:
        await greet(on, agent)
        assert not await on.metric("headwater_edge_http_errors_total")


async def greet(on: Stage, agent: Agent) -> None:
    """Say something, and go on. `staged` checks the answers."""
    await on.run(*agent.task, "Say hi.")
    before = len(on.recorder.generated)
    assert before
    await on.run(*agent.resume, "Say hi again.")
    assert len(on.recorder.generated) > before
