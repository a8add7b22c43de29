"""`headwater replay --into`: the recorded requests of one fleet, sent into it again."""

import asyncio
import json
from pathlib import Path

import numpy as np

from headwater.ops.whatif.live import FIRST_TOKEN, TOKENS, prompt_of
from headwater.ops.whatif.trace import TraceRequest
from tests.support.processes.fleet import fleet

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
