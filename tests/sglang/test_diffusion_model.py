"""A language model that fills blocks of tokens (a diffusion language model) behind the edge, on the real SGLang."""

from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest
import pytest_asyncio

from tests.support.engines import tiny_diffusion_model
from tests.support.processes.fleet import FleetProcess, fleet

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.xdist_group("sglang"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(400),
]

MODEL, WORKER = "diffusion", "worker-0"
TOKENS = 23
"""No multiple of a block: the last burst is cut."""


class Answer(NamedTuple):
    """The tokens of each event of a stream, and how it ended."""

    bursts: list[list[int]]
    finish: str
    usage: dict[str, Any]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def up(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FleetProcess]:
    """One worker, started again when it ends."""
    model = ("--model", str(tiny_diffusion_model.ensure()), "--served-model-name", MODEL)
    options = ("--max-model-len", "512", "--sglang-native=--dllm-algorithm LowConfidence")
    flags = ("--engine", "sglang", *model, *options, "--workers", "1")
    async with fleet(tmp_path_factory.mktemp("diffusion"), *flags, ready_s=300, sglang=True) as made:
        yield made


def body_of(number: int, **more: Any) -> dict[str, Any]:
    """A request for an answer to token ids."""
    prompt = [100 + (37 * number + 11 * at) % 900 for at in range(70)]
    body = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    return {**body, "return_token_ids": True, **more}


async def stream(client: httpx.AsyncClient, number: int, **more: Any) -> Answer:
    """An answer event by event."""
    bursts: list[list[int]] = []
    usage: dict[str, Any] = {}
    finish = ""
    body = body_of(number, stream=True, stream_options={"include_usage": True}, **more)
    async with client.stream("POST", "/v1/completions", json=body, timeout=120) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = msgspec.json.decode(line.removeprefix("data: "))
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                finish = choice["finish_reason"] or finish
                bursts += [choice["token_ids"]] if choice.get("token_ids") else []
    return Answer(bursts, finish, usage)


@pytest.mark.soak
async def test_an_answer_comes_in_bursts(up: FleetProcess) -> None:
    """One event for each block, as many tokens as were asked for, and the same as without a stream."""
    async with up.client() as client:
        answer = await stream(client, 1)
        whole = await client.post("/v1/completions", json=body_of(1), timeout=120)
    tokens = [token for burst in answer.bursts for token in burst]
    assert (len(tokens), answer.finish, answer.usage["completion_tokens"]) == (TOKENS, "length", TOKENS)
    assert max(map(len, answer.bursts)) == tiny_diffusion_model.BLOCK
    assert len(answer.bursts) <= 1 + TOKENS // 2
    assert whole.json()["choices"][0]["token_ids"] == tokens


@pytest.mark.soak
async def test_a_kill_in_the_middle_of_an_answer(up: FleetProcess) -> None:
    """Its only worker dies: the answer continues when the worker is back, without a token twice, or ends with one error."""
    async with up.client() as client:
        expected = await stream(client, 2, max_tokens=200)
        first = len(expected.bursts[0])
        bursts: list[int] = []
        error, killed = "", 0
        body = body_of(2, max_tokens=200, stream=True)
        async with client.stream("POST", "/v1/completions", json=body, timeout=200) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = msgspec.json.decode(line.removeprefix("data: "))
                error = event.get("error", {}).get("message", "") or error
                for choice in event.get("choices", ()):
                    bursts += choice.get("token_ids") or []
                if not killed and len(bursts) > first:
                    killed = await up.kill_worker(WORKER)
    wanted = [token for burst in expected.bursts for token in burst]
    assert bursts == wanted or (error and bursts == wanted[: len(bursts)])
    assert killed
    await up.until_whole(1)
    async with up.client() as client:
        assert [one for burst in (await stream(client, 1)).bursts for one in burst]
