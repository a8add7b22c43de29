"""A whole fleet with workers of TensorRT-LLM's double: legs joined in each of its three ways, and kills in each state.

The double stands for the library in the workers' processes; everything else is as in production.
"""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headwater.engines.tensorrt_llm import HandoffMode
from tests.support.processes.fleet import FleetProcess, fleet
from tests.support.tensorrt_llm.processes import FOLDER, SITE

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

LIMITS = {"cache_transceiver_config": {"max_tokens_in_buffer": 2048, "kv_transfer_timeout_ms": 5000}}
FLAGS = (
    *(
        "--engine",
        "tensorrt_llm",
        "--prefill-workers",
        "1",
        "--decode-workers",
        "1",
        "--max-model-len",
        "2048",
    ),
    *("--disaggregate", "always", "--local-prefill-tokens", "0", "--served-model-name", "tiny"),
    *("--tensorrt-llm-overrides", msgspec.json.encode(LIMITS).decode()),
)
PROGRAM = (
    "-c",
    f"import sys; sys.path.append({str(SITE)!r})\n"
    "from headwater.ops import cli; raise SystemExit(cli.main(sys.argv[1:]))",
)
"""`headwater` with the double: a process that is forked for a test has the path of the one that it is forked from."""

LONG = 200
MODES: tuple[HandoffMode, ...] = ("context-first", "generation-first", "opaque")
STATES = ("prefill", "handoff", "decode")


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The double on the path of processes that are started from here, and a folder where they meet."""
    (tmp_path / "meetings").mkdir()
    monkeypatch.setenv(FOLDER, str(tmp_path / "meetings"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(SITE)]))


async def ask(up: FleetProcess, number: int, tokens: int = LONG) -> Any:
    """The response to a prompt of its own, of some 200 tokens."""
    body = {
        "model": "tiny",
        "prompt": [(17 * at + number) % 200 + 20 for at in range(200)],
        "max_tokens": tokens,
        "temperature": 0,
        "seed": 7,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    async with up.client() as client:
        return await client.post("/v1/completions", json=body, timeout=120)


def tokens_of(response: Any) -> list[int]:
    """The answer's tokens."""
    assert response.status_code == 200, response.text
    found: list[int] = response.json()["choices"][0]["token_ids"]
    return found


async def kill_in(up: FleetProcess, state: str, victim: str, number: int) -> None:
    """One request, and SIGKILL of a worker in this state: the answer is whole and the same as without."""
    expected = tokens_of(await ask(up, number))
    assert len(expected) == LONG
    pids = {name: await up.worker_pid(name) for name in ("prefill-0", "decode-0")}
    held = {"prefill": "prefill-0", "handoff": "decode-0"}.get(state)
    if held:
        os.kill(pids[held], signal.SIGSTOP)
    asked = asyncio.ensure_future(ask(up, number))
    if held:
        await asyncio.sleep(0.5)
    else:
        await up.until(
            "it decodes", lambda stats: any(one["id"] == "decode-0" and one.get("running") for one in stats)
        )
    os.kill(pids[victim], signal.SIGKILL)
    if held and held != victim:
        os.kill(pids[held], signal.SIGCONT)
    assert tokens_of(await asked) == expected
    await up.until(
        "both workers are back",
        lambda stats: (
            {"prefill-0", "decode-0"} <= {one["id"] for one in stats if one.get("state") == "ready"}
        ),
        within_s=60,
    )
    for name in pids:
        assert await up.worker_pid(name) > 0


@pytest.mark.usefixtures("double")
async def test_two_legs_and_a_kill(tmp_path: Path) -> None:
    """Through edge, router and NATS; the double answers as if alone."""
    async with fleet(tmp_path, *FLAGS, program=PROGRAM) as up:
        response = await ask(up, 1, 12)
        assert len(tokens_of(response)) == 12
        _, text = await up.command("explain", response.headers["x-request-id"])
        assert "worker prefill-0" in text
        assert "worker decode-0" in text
        await kill_in(up, "handoff", "prefill-0", 2)


@pytest.mark.soak
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("mode", MODES)
async def test_a_kill_in_any_state_costs_no_wrong_answer(tmp_path: Path, mode: HandoffMode) -> None:
    """Three ways to join the legs, three states, two victims."""
    async with fleet(tmp_path, *FLAGS, "--tensorrt-llm-handoff", mode, program=PROGRAM) as up:
        for number, state in enumerate(STATES):
            for victim in ("prefill-0", "decode-0"):
                await kill_in(up, state, victim, 10 * number + len(victim))
