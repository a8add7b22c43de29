"""`headwater replay --into`: the recorded requests of one fleet, sent into it again."""

import asyncio
import json
from pathlib import Path

import numpy as np

from headwater.engines.sim import StepTime
from headwater.ops.bench.trace import Trace, TraceRequest
from headwater.ops.config.processes import LocalFleetSettings, with_settings
from headwater.ops.whatif.recording import Recording
from headwater.ops.whatif.replay_into import FIRST_TOKEN, TOKENS, prompt_of, simulated_settings
from headwater.ops.whatif.setup import Setup
from headwater.schemas.routing import Weights
from tests.support.processes.fleet import fleet

FORKED = """
import sys
from functools import partial

from headwater.ops import cli
from headwater.ops.launch import up

up.Machine = partial(up.Machine, spawner=up.start_spawner(cli.main))
sys.exit(cli.main(sys.argv[1:]))
"""
"""The command, whose fleet's processes are forked from it: executed, each imports for two seconds."""

PROMPT = "Where does a river begin? Answer in one sentence, please, and name the source. "


def test_prompts_begin_alike_as_far_as_their_blocks_do() -> None:
    """With the recorded length, and tokens that every vocabulary has."""
    one = TraceRequest("a", 0, 70, 5, (11, 12, 13, 14, 15), 16)
    other = one._replace(ids=(11, 12, 93, 94, 95))
    tokens, others = prompt_of(one), prompt_of(other)
    assert len(tokens) == len(others) == 70
    assert tokens[:32] == others[:32]
    assert tokens[32:48] != others[32:48]
    assert np.min(tokens) >= FIRST_TOKEN
    assert np.max(tokens) < FIRST_TOKEN + TOKENS


def test_a_simulated_fleet_is_as_the_recorded_one_was() -> None:
    """Roles, sizes, routing and step times; each setting is one that a fleet has."""
    setup = Setup(
        policy="kv",
        workers=0,
        prefill_workers=2,
        decode_workers=3,
        blocks=4,
        block_size=32,
        weights=Weights(crowding=0.5, local_tokens=9, apart=True),
        step_time=StepTime((1, 2, 3), (4, 5, 6)),
    )
    trace = Trace("t", (TraceRequest("a", 0, 700, 50, (1,), 32), TraceRequest("b", 9, 60, 500, (2,), 32)))
    values = simulated_settings(Recording(trace, setup, {}, 1, 1, 0, 0, fitted=True))
    settings = with_settings(LocalFleetSettings(), values)
    assert settings.fleet[:3] == (0, 2, 3)
    assert settings.engines.sim == (StepTime((1, 2, 3), (4, 5, 6)), 25)
    assert (settings.worker.block_size, settings.worker.max_model_len) == (32, 782)
    assert settings.router.weights == {"crowding": 0.5}
    assert (settings.router.local_prefill_tokens, settings.router.disaggregate) == (9, "always")


async def test_a_recorded_run_is_sent_again(tmp_path: Path) -> None:
    """Each request once, from a capture too; times are compared, and an endpoint that is gone is told."""
    async with fleet(tmp_path, "--engine", "sim", "--workers", "2") as up:
        async with up.client() as client:
            body = {"model": "sim", "max_tokens": 6, "stream": True}
            for number in range(12):
                answer = await client.post(
                    "/v1/completions", json=body | {"prompt": PROMPT + str(number % 3)}
                )
                assert answer.status_code == 200
        path = tmp_path / "a.hwc"
        async with asyncio.timeout(60):
            code, output = await up.command("capture", "--around", "-1s", "-o", str(path))
            assert code == 0, output
            code, output = await up.command("replay", "--into", up.url, "--speed", "20", "--json")
        assert code == 0, output
        data = json.loads(output)
        assert (data["requests"], data["errors"], data["compared"]) == (12, {}, 12)
        assert data["ttft_ms"]["mean"] > 0
        assert data["prompts"]["whole"] == 12
        code, output = await up.command("replay", "--into", up.url, "--file", str(path), "--speed", "20")
        assert code == 0, output
        assert "12 requests, 20 times as fast; 0 failed" in output
        # A fleet made for the purpose has the recorded workers, which had the default step times.
        code, output = await up.command(
            "-c", FORKED, "replay", "--into", "sim", "--file", str(path), "--speed", "5"
        )
        assert code == 0, output
        assert "12 requests, 5 times as fast; 0 failed" in output
        code, output = await up.command("replay", "--into", "http://127.0.0.1:9", "--file", str(path))
        assert code == 2
        assert "is out of reach" in output
        for words, text in (
            (("--into", up.url, "--verify"), "goes without"),
            (("--speed", "2"), "is for --into"),
        ):
            code, output = await up.command("replay", *words)
            assert code == 2
            assert text in output
