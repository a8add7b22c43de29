"""A fleet whose engine is another fleet, through its API: `examples/engines/openai_url.py`."""

import json
from pathlib import Path

import pytest

from tests.support.processes.fleet import fleet, stream_text

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

ENGINE = Path(__file__).resolve().parents[3] / "examples" / "engines" / "openai_url.py"


async def test_fleet_behind_a_fleet_answers_as_the_fleet_itself(tmp_path: Path) -> None:
    """The same tokens, streamed or not, with the same end; the server's rejection reaches the client."""
    (tmp_path / "near").mkdir()
    (tmp_path / "far").mkdir()
    async with fleet(tmp_path / "far", "--engine", "sim", "--workers", "1", "--sim-step-time", "zero") as far:
        options = json.dumps({"url": f"{far.url}/v1"})
        flags = ("--engine", str(ENGINE), "--workers", "1", "--engine-options", options)
        async with (
            fleet(tmp_path / "near", *flags, "--served-model-name", "sim") as near,
            near.client() as client,
            far.client() as direct,
        ):
            body = {"model": "sim", "prompt": "Where does a river begin?", "max_tokens": 40, "seed": 7}
            expected = (await direct.post("/v1/completions", json=body)).json()
            found = (await client.post("/v1/completions", json=body)).json()
            assert found["choices"][0]["text"] == expected["choices"][0]["text"] != ""
            assert found["choices"][0]["finish_reason"] == expected["choices"][0]["finish_reason"]
            assert found["usage"]["completion_tokens"] == 40
            chat = {
                "model": "sim",
                "messages": [{"role": "user", "content": "And where does it end?"}],
                "max_tokens": 30,
                "seed": 7,
            }
            streamed = await stream_text(client, chat)
            assert streamed[:2] == (await stream_text(direct, chat))[:2]
