"""What commands say about wrong input, about outputs that cannot be written, and about settings by environment."""

import asyncio
import os
import re
from pathlib import Path
from typing import Any

import pytest

from headwater.actors.edge.saga.types import PLACE_S_MAX
from headwater.ops.start.sockets import free_range
from tests.support.processes.commands import Ended, ended, launched
from tests.support.processes.fleet import FleetProcess, shared_fleet

pytestmark = [pytest.mark.processes, pytest.mark.asyncio(loop_scope="module")]

FREE = ("--port", "0", "--nats-port", "0")
CHAT: dict[str, Any] = {
    "model": "sim",
    "messages": [{"role": "user", "content": "Where does a river begin? " * 20}],
    "max_tokens": 4,
}
COMMANDS = (("tree",), ("replay", "--verify"), ("streams", "--json"))
STRUCT = re.compile(r"\b[A-Z][A-Za-z]+\([a-z_]+=")
"""A struct as Python prints it."""


up = shared_fleet("--engine", "sim", "--tier", "silver")
"""Two simulated workers of one tier."""


async def _request(up: FleetProcess) -> str:
    """Have a request answered; its id."""
    async with up.client() as client:
        answer = await client.post("/v1/chat/completions", json=CHAT)
        assert answer.status_code == 200, answer.text
        return answer.headers["x-request-id"]


async def test_no_workers_are_an_error(tmp_path: Path) -> None:
    """`--workers 0` is not the default."""
    flags = ("--engine", "sim", "--data-dir", str(tmp_path / "data"), *FREE)
    line = (await ended("up", *flags, "--workers", "0", within_s=15)).told()
    assert "--workers" in line


async def test_explain_tells_a_request_in_words(up: FleetProcess) -> None:
    """Its decision and its life are text; without an id, with a part of one or with an unknown one it is an error."""
    request = await _request(up)
    await up.until_indexed(25)
    empty = await ended("explain", "", "--nats", up.nats)
    code, output = await up.command("explain", request)
    unknown, _ = await up.command("explain", "chatcmpl-0000")
    assert code == 0
    assert request in output
    assert not STRUCT.search(output), output
    assert "Candidate(" not in output
    assert "worker-" in output
    assert "REQUEST" in empty.told() or "request" in empty.told()
    assert unknown == 1


async def test_an_output_that_cannot_be_written(up: FleetProcess) -> None:
    """On a full disk: one line, non-zero. Into a pipe that nobody reads: no traceback."""
    await _request(up)
    await up.until_indexed(25)
    full = [await _into_a_full_disk(up, *command) for command in COMMANDS]
    piped = [await _into_a_closed_pipe(up, *command) for command in COMMANDS]
    for one in full:
        assert "No space left" in one.told()
    for one in piped:
        assert "Traceback" not in one.output
        assert "BrokenPipe" not in one.output


async def _into_a_full_disk(up: FleetProcess, *command: str) -> Ended:
    with open("/dev/full", "wb") as full:
        return await ended(*command, "--nats", up.nats, stdout=full)


async def _into_a_closed_pipe(up: FleetProcess, *command: str) -> Ended:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as pipe:
        return await ended(*command, "--nats", up.nats, stdout=pipe)


@pytest.mark.parametrize(
    ("environ", "workers"),
    [
        pytest.param(
            {"PREFILL_WORKERS": "1", "DECODE_WORKERS": "2"},
            ["decode-0", "decode-1", "prefill-0"],
            marks=pytest.mark.soak,
        ),
        pytest.param({"NAME": "mine", "WORKERS": "1"}, ["mine"], marks=pytest.mark.soak),
        (
            {"METRICS_PORT": "free", "PORT": "free", "DRAIN_TIMEOUT": "1", "WORKERS": "3"},
            ["worker-0", "worker-1", "worker-2"],
        ),
    ],
    ids=lambda value: "-".join(value).lower() if isinstance(value, dict) else "",
)
async def test_settings_of_the_fleet_by_environment(
    tmp_path: Path, environ: dict[str, str], workers: list[str]
) -> None:
    """`up` takes them for the fleet; its processes do not take them again for themselves."""
    made = {
        f"HEADWATER_{name}": str(free_range(5, "127.0.0.1") if text == "free" else text)
        for name, text in environ.items()
    }
    flags = ["--engine", "sim", "--nats-port", "0", "--data-dir", str(tmp_path / "data")]
    if "PORT" not in environ:
        flags += ["--port", "0"]
    async with launched(tmp_path, *flags, environ=made, ready_s=20) as up:
        async with up.client() as client:
            health = (await client.get("/health")).json()
            assert sum(health["workers"].values()) == len(workers)
            answer = await client.post("/v1/chat/completions", json=CHAT)
            assert answer.headers["x-headwater-worker"] in workers
        if "PORT" in environ:
            assert up.url.endswith(":" + made["HEADWATER_PORT"])
        lines = [line for name in workers for line in up.pids(f"--name {name}")]
        assert len(lines) == len(workers)


@pytest.mark.parametrize(
    ("engine", "setting", "value", "by"),
    [
        ("sim", "--connector", "nixl", "flag"),
        ("sim", "--allow", "vulnerable", "flag"),
        ("sim", "--handoff-host", "10.0.0.1", "environment"),
        ("sim", "--gpus-per-worker", "1", "flag"),
        ("vllm", "--sim-blocks", "100", "flag"),
        ("vllm", "--sim-step-time", "zero", "flag"),
    ],
)
async def test_a_setting_that_the_engine_does_not_use(
    tmp_path: Path, engine: str, setting: str, value: str, by: str
) -> None:
    """It is an error that names the setting and the engine, however the setting was given."""
    variable = "HEADWATER_" + setting[2:].replace("-", "_").upper()
    given, environ = ((setting, value), {}) if by == "flag" else ((), {variable: value})
    flags = ("--engine", engine, "--data-dir", str(tmp_path / "data"), *FREE)
    line = (await ended("up", *flags, *given, within_s=15, environ=environ)).told()
    assert setting in line or variable in line
    assert engine in line


async def test_an_engine_process_refuses_it_too(tmp_path: Path) -> None:
    """`headwater engine` has the same rule, before it looks for a server."""
    line = (await ended("engine", "--engine", "sim", "--logits-processors", "a=b:c", within_s=15)).told()
    assert "--logits-processors" in line


async def test_a_tier_that_no_worker_has(up: FleetProcess) -> None:
    """Refused at once and by name; a tier that exists is served."""
    async with up.client() as client:
        served = await client.post("/v1/chat/completions", json=CHAT, headers={"x-headwater-tier": "silver"})
        assert served.status_code == 200, served.text
        for stream in (False, True):
            # A request that no worker can take now waits for one that long.
            async with asyncio.timeout(PLACE_S_MAX):
                answer = await client.post(
                    "/v1/chat/completions",
                    json={**CHAT, "stream": stream},
                    headers={"x-headwater-tier": "gold"},
                )
            assert answer.status_code in (400, 404, 422, 503)
            assert "gold" in answer.json()["error"]["message"]
