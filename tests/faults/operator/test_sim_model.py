"""`--engine sim --model DIR`: simulated workers that serve a real model's name, tokenizer, template and context."""

from pathlib import Path

import pytest

from tests.support.engines import model_folder
from tests.support.processes.commands import ended
from tests.support.processes.fleet import fleet, stream_text

pytestmark = [pytest.mark.processes]

MESSAGES = [{"role": "user", "content": "Where does the quick brown river begin?"}]


async def test_a_simulated_fleet_serves_a_model(tmp_path: Path) -> None:
    """Its name, its counts of tokens, its limits; also after a prompt that is too long."""
    tokenizer = model_folder.make(tmp_path / "tiny-river")
    chat = len(tokenizer.encode(model_folder.rendered(MESSAGES), add_special_tokens=False).ids)
    text = "the lazy dog jumps over "
    plain = len(tokenizer.encode(text).ids)
    async with fleet(tmp_path, "--engine", "sim", "--model", str(tmp_path / "tiny-river")) as up:
        async with up.client() as client:
            [model] = (await client.get("/v1/models")).json()["data"]
            assert model["id"] == "tiny-river"
            assert model["max_model_len"] == model_folder.CONTEXT
            body = {"model": "tiny-river", "max_tokens": 6, "ignore_eos": True}
            answer, finish, usage = await stream_text(client, {**body, "messages": MESSAGES})
            assert answer
            assert (finish, usage["prompt_tokens"], usage["completion_tokens"]) == ("length", chat, 6)
            unary = (await client.post("/v1/completions", json={**body, "prompt": text})).json()
            assert unary["usage"]["prompt_tokens"] == plain
            assert unary["choices"][0]["text"]
            long = await client.post("/v1/completions", json={**body, "prompt": text * model_folder.CONTEXT})
            assert long.status_code == 400
            assert str(model_folder.CONTEXT) in long.json()["error"]["message"]
            unknown = await client.post("/v1/completions", json={**body, "model": "sim", "prompt": text})
            assert unknown.status_code == 404
            assert (await client.post("/v1/completions", json={**body, "prompt": text})).status_code == 200


@pytest.mark.soak
async def test_the_name_and_the_context_may_be_set(tmp_path: Path) -> None:
    """As with a real engine: `--served-model-name` and `--max-model-len` go before what the folder says."""
    model_folder.make(tmp_path / "tiny-river")
    flags = ("--served-model-name", "river", "--max-model-len", "120", "--workers", "1")
    async with fleet(tmp_path, "--engine", "sim", "--model", str(tmp_path / "tiny-river"), *flags) as up:
        async with up.client() as client:
            [model] = (await client.get("/v1/models")).json()["data"]
    assert (model["id"], model["max_model_len"]) == ("river", 120)


@pytest.mark.parametrize("missing", ["folder", "tokenizer.json"])
async def test_a_model_that_is_not_there(tmp_path: Path, missing: str) -> None:
    """One line that names what is missing, before anything is started."""
    folder = tmp_path / "tiny-river"
    if missing != "folder":
        model_folder.make(folder)
        (folder / missing).unlink()
    data = str(tmp_path / "data")
    flags = ("--engine", "sim", "--model", str(folder), "--port", "0", "--nats-port", "0", "--data-dir", data)
    line = (await ended("up", *flags, within_s=15)).told()
    assert str(folder) in line
    assert missing in line
