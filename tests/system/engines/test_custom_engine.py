"""An engine in one file behind `headwater up`: it serves, and its mistakes cost one epoch, not the fleet."""

from pathlib import Path

import msgspec
import pytest

from headwater.actors.edge.saga.saga import DEATHS_MAX
from tests.support.processes.fleet import fleet

pytestmark = [pytest.mark.processes]

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "engines"

FRAGILE = """
from headwater.engines.custom import EngineInfo, EngineRequest, EngineSetup

class Fragile:
    async def start(self, setup):
        return setup.info()

    async def generate(self, request):
        if request.sampling.seed == 13:
            raise ZeroDivisionError("a mistake in the engine's file")
        for token in request.tokens:
            yield token
"""


async def test_file_serves_and_an_exception_in_it_does_not_end_the_fleet(tmp_path: Path) -> None:
    """The prompt comes back. A request that the engine dies of is given up after three epochs, each with its traceback in
    the log, and the next epoch serves.
    """
    path = tmp_path / "fragile.py"
    path.write_text(FRAGILE)
    body = {"model": "fragile", "prompt": "north", "max_tokens": 5}
    async with fleet(tmp_path, "--engine", str(path), "--workers", "1") as up, up.client() as client:
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == "north"
        before = next(s["epoch"] for s in await up.stats() if s["name"] == "headwater-worker")
        failed = await client.post("/v1/completions", json={**body, "seed": 13})
        assert failed.status_code == 502, failed.text
        assert failed.json()["error"]["code"] == "request_ended_workers"
        assert "ZeroDivisionError" in failed.json()["error"]["message"]
        assert failed.headers["x-should-retry"] == "false"
        await up.until(
            "a new epoch serves",
            lambda stats: any(
                s["name"] == "headwater-worker"
                and s.get("epoch", 0) >= before + DEATHS_MAX
                and s["state"] == "ready"
                for s in stats
            ),
        )
        again = await client.post("/v1/completions", json=body)
        assert again.json()["choices"][0]["text"] == "north"
    lines = [line for line in up.log.read_bytes().splitlines() if b"engine_code_failed" in line]
    assert len(lines) == DEATHS_MAX
    [cause] = msgspec.json.decode(lines[0])["exception"]
    assert (cause["exc_type"], cause["exc_value"]) == ("ZeroDivisionError", "a mistake in the engine's file")
    assert cause["frames"][-1]["filename"] == str(path)


async def test_prompt_computed_by_one_worker_is_continued_by_another(tmp_path: Path) -> None:
    """Between two processes: the answer follows from the KV, which the example fetches from the prefill worker."""
    flags = (
        "--engine",
        str(EXAMPLES / "prefill_decode.py"),
        "--prefill-workers",
        "1",
        "--decode-workers",
        "1",
        "--disaggregate",
        "always",
        "--local-prefill-tokens",
        "0",
    )
    prompt = "Where does a river begin? " * 10
    async with fleet(tmp_path, *flags) as up, up.client() as client:
        body = {"model": "prefill_decode", "prompt": prompt, "max_tokens": 4, "return_token_ids": True}
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        kv = sum(choice["prompt_token_ids"])
        assert choice["token_ids"] == [(kv + number) % 250 for number in range(4)]
        code, text = await up.command("explain", answer.headers["x-request-id"])
        assert code == 0
        assert "worker prefill-0" in text
        assert "worker decode-0" in text
