"""Two LoRA adapters in real vLLM engines: each answers in its own way, also while one is unloaded under load."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headwater.actors.cards import Served
from headwater.engines.engine import Engine
from headwater.engines.model_files import read_model_files
from headwater.ops import demo_model
from tests.support.adapters import make_adapter
from tests.support.lora_fleet import Client, Fleet, serving, until

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm"), pytest.mark.timeout(400)]

INSIDE = "HEADWATER_TEST_INSIDE"
PROMPT = "The capital of France is"
TOKENS = 6
RANK = 8
LAYERS = {
    f"base_model.model.model.layers.{layer}.self_attn.{name}": shape
    for layer in range(30)
    for name, shape in {"v_proj": (192, 576), "o_proj": (576, 576)}.items()
}
"""The small model's; without as much change as this an adapter would not show."""


def engine(folder: Path, worker: str) -> tuple[Engine, Served]:
    """A real engine with two slots for adapters."""
    from headwater.engines.vllm import VllmEngine, VllmSettings

    files = read_model_files(folder)
    overrides = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}
    settings: Any = VllmSettings(str(folder), files.name, worker, max_model_len=256, kv_cache_mib=128)
    return VllmEngine(settings._replace(overrides=overrides)), Served(files.name, files)


async def text(client: Client, model: str) -> str:
    """What a model says, greedily."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    response = await client.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] == TOKENS
    said: str = response.json()["choices"][0]["text"]
    return said


def test_two_adapters_are_loaded_routed_and_unloaded_under_load() -> None:
    """In a process of its own: where other tests had engines before, vLLM's workers do not come up in it again."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n",
            "0",
            "-p",
            "no:cacheprovider",
            # It ends before this process does, and tells where it stood.
            "--timeout",
            "300",
            f"{__file__}::test_inside",
        ],
        env=environ | {INSIDE: "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=380,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stdout[-12_000:]
    assert "1 passed" in done.stdout


@pytest.mark.skipif(INSIDE not in os.environ, reason="run by the test above, in a process of its own")
async def test_inside(tmp_path: Path) -> None:
    """Every answer is its own model's, whichever worker gave it, and none is missing."""
    folder = demo_model.ensure()
    made = {name: engine(folder, name) for name in ("w1", "w2")}
    async with serving(tmp_path, **made) as (fleet, client):
        one, two = (fleet.workers[name].adapters for name in ("w1", "w2"))
        assert one is not None
        assert two is not None
        base = folder.name
        alpha, beta = (source(fleet, name, number) for number, name in enumerate(("alpha", "beta")))
        await one.load("alpha", alpha)
        await two.load("beta", beta)
        await until(lambda: listed(client, {base, "alpha", "beta"}))
        said = {model: await text(client, model) for model in (base, "alpha", "beta")}
        assert len(set(said.values())) == 3, said
        assert "Paris" in said[base]
        assert await client.answered("alpha", PROMPT, 2) == "w1"
        assert await client.answered("beta", PROMPT, 2) == "w2"

        stop = asyncio.Event()
        counts = dict.fromkeys(said, 0)

        async def load(model: str) -> None:
            while not stop.is_set():
                assert await text(client, model) == said[model]
                counts[model] += 1

        async with asyncio.TaskGroup() as group:
            for model in (*said, "alpha"):
                group.create_task(load(model))
            await two.load("alpha", alpha)
            await one.unload("alpha")
            seen = counts["alpha"]
            await until(lambda: more(counts, "alpha", seen + 4), within_s=90)
            stop.set()
        assert await client.answered("alpha", PROMPT, 2) == "w2"
        assert [held["name"] for held in await one.list()] == []
        await two.unload("alpha", forget=True)
        await until(lambda: listed(client, {base, "beta"}))
        assert (await client.ask("alpha")).status_code == 404
        assert await text(client, "beta") == said["beta"]


def source(fleet: Fleet, name: str, seed: int) -> str:
    """An adapter for the small model."""
    base = "HuggingFaceTB/SmolLM2-135M-Instruct"
    folder = make_adapter(
        fleet.sources / name, seed, rank=RANK, layers=LAYERS, scale=0.5, base_model_name_or_path=base
    )
    return str(folder)


async def listed(client: Client, names: set[str]) -> bool:
    """Are these the models?"""
    return set(await client.models()) == names


async def more(counts: dict[str, int], model: str, count: int) -> bool:
    """Did a model answer so often?"""
    return counts[model] >= count
