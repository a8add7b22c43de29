"""The fleet files of `deploy/fleets` with the engines that they name: on this machine, with models of its size.

Roles, routers, numbers of processes, settings and arguments are the files'; only what needs a GPU, several of them, or a folder that is
not there is replaced (`arguments_here`, `settings_here`, `Local`).
"""

import asyncio
import base64
import io
import sys
import tomllib
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from msgspec import structs
from PIL import Image

from headwater.ops.launch.fleet_file import PoolOfModel, Workers, read_fleet
from headwater.ops.start.sockets import free_range
from tests.support.clients.encoding import encode_legs
from tests.support.clients.pictures import picture_url
from tests.support.engines import peft, tiny_model
from tests.support.engines.diffusion import tiny_image_pipeline
from tests.support.engines.multimodal import tiny_vision_model
from tests.support.network.ssh import NO_SSHD, running, sshd, until_logged, write_keys
from tests.support.processes.commands import ended, launched
from tests.support.processes.fleet import FleetProcess
from tests.support.processes.fleet_files import written
from tests.support.sglang.environment import PYTHON

FLEETS: Final = Path(__file__).parents[2] / "deploy" / "fleets"
MULTI_NODE: Final = FLEETS / "multi-node.toml"
EXAMPLES: Final = sorted(set(FLEETS.rglob("*.toml")) - {MULTI_NODE})

GPU_MEMORY_SHARE: Final = "0.2"
AT_ONCE, PROMPT_TIMES = 16, 100
MODEL_LEN_MAX: Final = 4096
ADAPTER: Final = "river"
QUESTION: Final = "Where does a river begin, and where does it end? "

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.soak,
    pytest.mark.xdist_group("vllm"),
    pytest.mark.timeout(400),
]


def arguments_here(workers: Workers) -> list[str]:
    """An engine's arguments for this machine: one process on each node.

    Nodes share tensors and no stages: vLLM 0.32 fails with stages on CPUs (`intermediate_tensors` is None).
    """
    here = {
        "--tensor-parallel-size": str(workers.nodes),
        "--pipeline-parallel-size": "1",
        "--gpu-memory-utilization": GPU_MEMORY_SHARE,
    }
    given = workers.arguments
    return [here.get(before, word) for before, word in zip(["", *given], given, strict=False)]


def settings_here(workers: Workers) -> dict[str, Any]:
    """The settings of workers for this machine."""
    settings = dict(workers.settings)
    if workers.engine == "vllm":
        settings["vllm"] = {"native": "--kv-cache-memory-bytes=67108864", **settings.get("vllm", {})}
    longest = settings.get("worker", {}).get("max_model_len", 0)
    if longest:
        settings["worker"] = {**settings["worker"], "max_model_len": min(longest, MODEL_LEN_MAX)}
    return settings


class Local:
    """Puts models of this machine in place of those that a file names."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def pool(self, name: str, pool: PoolOfModel) -> PoolOfModel:
        """A pool as this machine can run it."""
        settings = pool.settings
        if "lora" in settings:
            peft.make(self._folder / "adapters" / ADAPTER, tiny_model.ensure(), seed=3)
            settings = {**settings, "lora": {**settings["lora"], "sources": [str(self._folder / "adapters")]}}
        workers = [
            structs.replace(one, arguments=arguments_here(one), settings=settings_here(one))
            for one in pool.workers
        ]
        return structs.replace(pool, model=self._model(name, pool), settings=settings, workers=workers)

    def _model(self, name: str, pool: PoolOfModel) -> str:
        if "diffusers" in {one.engine for one in pool.workers}:
            return str(tiny_image_pipeline.make(self._folder / "pipeline"))
        return str((tiny_vision_model if "-VL-" in name else tiny_model).ensure())


async def _ask_text(client: httpx.AsyncClient, model: str, pool: PoolOfModel) -> None:
    roles = {one.role for one in pool.workers}
    if "prefill" not in roles:
        await _chat(client, model, QUESTION)
        return
    # At once: an idle decode worker computes a prompt itself.
    prompts = [f"{number}. {QUESTION}" * PROMPT_TIMES for number in range(AT_ONCE)]
    replies = await asyncio.gather(*(_chat(client, model, prompt) for prompt in prompts))
    assert any("x-headwater-prefill-worker" in reply.headers for reply in replies)


async def _ask_adapter(client: httpx.AsyncClient, model: str, up: FleetProcess, folder: Path) -> None:
    """An adapter is loaded by one worker; the other one loads it when a request names it."""
    first, second = sorted(one["id"] for one in await up.stats() if one["name"] == "headwater-worker")
    await _control(up, first, "load-lora", ADAPTER, str(folder / "adapters" / ADAPTER))
    answer = await _chat(client, ADAPTER, QUESTION)
    assert _text(await _chat(client, model, QUESTION)) != _text(answer)
    await _control(up, first, "drain")
    other = await _chat(client, ADAPTER, QUESTION)
    assert other.headers["x-headwater-worker"] == second
    assert _text(other) == _text(answer)


async def _control(up: FleetProcess, *words: str) -> None:
    done = await ended("ctl", *words, "--nats", up.nats, within_s=60)
    assert done.code == 0, done.output


async def _ask_about_pictures(client: httpx.AsyncClient, model: str, up: FleetProcess) -> None:
    for seed in range(3):
        parts = [
            {"type": "image_url", "image_url": {"url": picture_url(seed)}},
            {"type": "text", "text": "What is this?"},
        ]
        await _chat(client, model, parts)
    assert sum((await encode_legs(up)).values()) == 3


async def _ask_for_a_picture(client: httpx.AsyncClient, model: str) -> None:
    side = tiny_image_pipeline.SIDE
    body = {"model": model, "prompt": "a river", "size": f"{side}x{side}"}
    reply = await client.post("/v1/images/generations", json=body)
    assert reply.status_code == 200, reply.text
    file = base64.b64decode(reply.json()["data"][0]["b64_json"])
    assert Image.open(io.BytesIO(file)).size == (side, side)


async def _chat(client: httpx.AsyncClient, model: str, content: Any) -> httpx.Response:
    body = {"model": model, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    messages = [{"role": "user", "content": content}]
    reply = await client.post("/v1/chat/completions", json={**body, "messages": messages})
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["completion_tokens"] == 8
    return reply


def _text(reply: httpx.Response) -> str:
    text: str = reply.json()["choices"][0]["message"]["content"]
    return text


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
async def test_every_example_runs_on_its_engines(path: Path, tmp_path: Path) -> None:
    fleet = read_fleet(path)
    file = written(fleet, tmp_path, Local(tmp_path).pool)
    async with launched(tmp_path, str(file), command="launch", ready_s=300) as up:
        async with httpx.AsyncClient(base_url=up.url, timeout=90) as client:
            listed = {one["id"] for one in (await client.get("/v1/models")).json()["data"]}
            assert listed >= set(fleet.pools)
            for name, pool in fleet.pools.items():
                if "diffusers" in {one.engine for one in pool.workers}:
                    await _ask_for_a_picture(client, name)
                elif "-VL-" in name:
                    await _ask_about_pictures(client, name, up)
                else:
                    await _ask_text(client, name, pool)
                if "lora" in pool.settings:
                    await _ask_adapter(client, name, up, tmp_path)


@pytest.mark.sglang
@pytest.mark.skipif(NO_SSHD, reason="sshd is not installed")
async def test_the_example_of_several_hosts_runs_on_its_engines(tmp_path: Path) -> None:
    """Three addresses of this machine: a model of vLLM in two stages on two of them, and one of SGLang, from its own environment, on the third."""
    with sshd(tmp_path) as ssh_config:
        await _run_several_hosts(tmp_path, ssh_config)


async def _run_several_hosts(tmp_path: Path, ssh_config: Path) -> None:
    fleet = read_fleet(MULTI_NODE)
    addresses = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
    nats_port = free_range(1, "127.0.0.1")
    write_keys(tmp_path, addresses, nats_port)
    # One host has the edge: these three share their ports.
    machines = [
        'edges.hosts = ["a"]',
        f'nats = {{ hosts = {fleet.nats_hosts}, port = {nats_port}, keys_dir = "{tmp_path}/keys" }}',
    ]
    for (name, _), address in zip(fleet.hosts.items(), addresses, strict=True):
        python = PYTHON if name == "c" else sys.executable
        machines += [
            f"[hosts.{name}]",
            f'address = "{address}"',
            f'command = "{python} -m headwater.ops.cli"',
            f'ssh = "-F {ssh_config} {name}"',
        ]

    def change(name: str, pool: PoolOfModel) -> PoolOfModel:
        made = Local(tmp_path).pool(name, pool)
        # Eight engines of SGLang are more than two cores start.
        return structs.replace(made, workers=[structs.replace(one, count=1) for one in made.workers])

    file = written(fleet, tmp_path, change, machines)
    port = tomllib.loads(file.read_text())["edges"]["settings"]["http"]["port"]
    async with running(tmp_path, file):
        await until_logged(tmp_path / "launch.log", "the fleet is ready on 3 hosts", within_s=330)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=90) as client:
            for name, pool in fleet.pools.items():
                await _ask_text(client, name, pool)
