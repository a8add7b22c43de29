"""Two LoRA adapters in real vLLM engines: each answers in its own way, also while one is unloaded under load.

A long form: adapters in a real engine are in the engines' contract suite, and loading and unloading in a fleet in tests/system.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headwater.actors.worker.model_card import Served
from headwater.engines.engine import Engine, EngineInfo
from headwater.engines.model_files import read_model_files
from headwater.engines.vllm import VllmOptions, preload
from tests.support.engines import tiny_model
from tests.support.engines.adapters import make_adapter
from tests.support.engines.settings import engine_settings
from tests.support.processes import zygote
from tests.support.worlds.lora_fleet import Client, Fleet, serving, until

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm")]

INSIDE = "HEADWATER_TEST_INSIDE"
ENVIRON = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
"""As it was when this file was read, before any test: vLLM sets a dozen variables in a process that has engines."""

PROGRAM = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
INSIDE_S = 270
"""Beside three busy loops on two cores it takes one minute."""

PROMPT = "The capital of France is"
TOKENS = 6
RANK = 8
LAYERS = {
    f"base_model.model.model.layers.{layer}.self_attn.{name}": shape
    for layer in range(2)
    for name, shape in {"v_proj": (64, 64), "o_proj": (64, 64)}.items()
}
"""The tiny model's."""


@contextlib.asynccontextmanager
async def engines(folder: Path, *names: str) -> AsyncIterator[dict[str, tuple[Engine, Served]]]:
    """Real engines of workers, with two slots for adapters each, up before there is any actor.

    An engine that comes up keeps the loop for many seconds, and a lease lives for three: in a fleet each worker has
    a process of its own, here they would cost each other their leases.
    """
    # As `headwater up` on a CPU: vLLM is imported once instead of six times, its processes are forks, their
    # threads are not all bound to the first core, and they pause while they poll.
    preload.preload()
    from headwater.engines.vllm.engine import VllmEngine

    class UpAlready(VllmEngine):
        info: EngineInfo | None = None

        async def start(self) -> EngineInfo:
            self.info = self.info or await super().start()
            return self.info

    files = read_model_files(folder)
    native = (
        f"--kv-cache-memory-bytes={128 << 20}",
        "--enable-lora",
        "--max-loras=2",
        f"--max-lora-rank={RANK}",
    )
    options = VllmOptions(native=native)
    made: dict[str, tuple[Engine, Served]] = {}
    async with contextlib.AsyncExitStack() as stack:
        for name in names:
            engine = UpAlready(
                engine_settings(options, str(folder), files=files, name=name, max_model_len=256)
            )
            # Again behind its worker's end, which is fine.
            stack.push_async_callback(engine.stop)
            await engine.start()
            made[name] = engine, Served(files.name, files)
        yield made


async def text(client: Client, model: str) -> str:
    """What a model says, greedily."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    response = await client.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] == TOKENS
    said: str = response.json()["choices"][0]["text"]
    return said


@pytest.mark.soak
@pytest.mark.timeout(INSIDE_S + 60)
async def test_two_adapters_are_loaded_routed_and_unloaded_under_load(tmp_path: Path) -> None:
    """In a process of its own: where other tests had engines before, vLLM's workers do not come up in it again."""
    # vLLM has imported some that pytest would rewrite.
    imported = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
    words = ["-q", "-n", "0", "-p", "no:cacheprovider", *imported, f"{__file__}::test_inside"]
    # Into a file: an end of a pipe in a process of vLLM's would be waited for like the test itself.
    output = tmp_path / "output"
    with output.open("wb") as file:
        inside = await zygote.start(
            "-c",
            PROGRAM,
            *words,
            stdout=file,
            stderr=zygote.STDOUT,
            environ=ENVIRON | {INSIDE: "1"},
            vllm=True,
        )
    status: int | str
    try:
        async with asyncio.timeout(INSIDE_S + 30):
            status = await inside.wait()
    except TimeoutError:
        status = f"did not end within {INSIDE_S + 30} s"
    finally:
        # With all its processes, whether it ended or not: nothing may load the machine for the tests behind it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(inside.pid, signal.SIGKILL)
        await inside.wait()
    told = output.read_text(errors="replace")
    assert status == 0, f"{status}: {told[-12_000:]}"
    assert "1 passed" in told


# By a thread, which tells where everything stands and ends the process, whatever keeps its loop.
@pytest.mark.timeout(INSIDE_S, method="thread")
@pytest.mark.skipif(INSIDE not in os.environ, reason="run by the test above, in a process of its own")
async def test_inside(tmp_path: Path) -> None:
    """Every answer is its own model's, whichever worker gave it, and none is missing."""
    async with asyncio.timeout(INSIDE_S - 40), engines(tiny_model.ensure(), "w1", "w2") as made:
        await check(tmp_path, made)


async def check(tmp_path: Path, made: dict[str, tuple[Engine, Served]]) -> None:
    """See the test."""
    async with serving(tmp_path, **made) as (fleet, client):
        one, two = (fleet.workers[name].lora for name in ("w1", "w2"))
        assert one is not None
        assert two is not None
        base = made["w1"][1].name
        before = await text(client, base)
        alpha, beta = (source(fleet, name, number) for number, name in enumerate(("alpha", "beta")))
        await one.load("alpha", alpha)
        await two.load("beta", beta)
        await until(lambda: listed(client, {base, "alpha", "beta"}))
        said = {model: await text(client, model) for model in (base, "alpha", "beta")}
        assert len(set(said.values())) == 3, said
        assert said[base] == before
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
    """An adapter for the tiny model."""
    base = f"someone/{tiny_model.NAME}"
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
