"""A fleet with a worker of vLLM and one of SGLang, which serve the same weights in one pool."""

import asyncio
import itertools
import os
import random
import re
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest
import pytest_asyncio

from tests.engines import cases
from tests.engines.conftest import MODEL, Mixed, ready
from tests.support.clients.media_chat import content
from tests.support.clients.pictures import picture_url
from tests.support.marks import BOTH_ENGINES
from tests.support.processes.fleet import command_line, descendants

VLLM, SGLANG = cases.VLLM.worker, cases.SGLANG.worker

pytestmark = [*BOTH_ENGINES, pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(400)]

GAP_MAX = 1e-3
"""Two tokens whose log probabilities differ by less may change places between engines: their sums have other orders."""

LOAD_S = 300.0
CLIENTS = 6
PROMPTS_MAX = 32
LOAD_TOKENS = 64
"""What the long form asks for: for how long, how many at a time, how many prompts, and tokens of an answer."""


@pytest_asyncio.fixture(autouse=True, loop_scope="package")
async def both_ready(mixed: Mixed) -> None:
    """Each test meets both workers, whatever the one before did to them."""
    await mixed.until_ready()


async def complete(
    client: httpx.AsyncClient, prompt: list[int], worker: str = "", **more: Any
) -> httpx.Response:
    """A greedy completion, by this worker if one is named."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True, **more}
    headers = {"x-headwater-worker": worker} if worker else {}
    answer = await client.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    assert not worker or answer.headers["x-headwater-worker"].startswith(worker)
    return answer


async def weights(mixed: Mixed, *shares: str) -> None:
    """Set which share of the requests each engine gets, or `remove` that."""
    code, text = await mixed.up.command("ctl", "weights", MODEL, *shares)
    assert code == 0, text


def prompts() -> list[list[int]]:
    """Token ids of eight prompts, from half a block to four blocks."""
    return [
        [100 + 37 * number + (position * (number + 3)) % 900 for position in range(16 * (number + 1))]
        for number in range(8)
    ]


class Expected(NamedTuple):
    """A prompt and the tokens of its answer."""

    prompt: list[int]
    tokens: list[str]


async def certain_answers(client: httpx.AsyncClient) -> list[Expected]:
    """Prompts with answers in which no token is nearly as likely as another: whatever continues them, they stay the same."""
    draw, found = random.Random(3), []
    for number in range(PROMPTS_MAX):
        prompt = [draw.randrange(100, 1000) for _ in range(20 + 12 * (number % 8))]
        both = []
        for worker in (VLLM, SGLANG):
            answer = await complete(client, prompt, worker, logprobs=2, max_tokens=LOAD_TOKENS)
            both.append(answer.json()["choices"][0]["logprobs"])
        pairs = [sorted(top.values(), reverse=True)[:2] for told in both for top in told["top_logprobs"]]
        if both[0]["tokens"] == both[1]["tokens"] and all(one - two > GAP_MAX for one, two in pairs):
            found.append(Expected(prompt, both[0]["tokens"]))
    assert len(found) >= PROMPTS_MAX // 4
    return found


async def answered_by(client: httpx.AsyncClient, expected: list[Expected]) -> Counter[str]:
    """Ask for `LOAD_S`, some at a time, and compare each answer. Returns how many each worker finished."""
    workers: Counter[str] = Counter()
    numbers, end_s = itertools.count(), time.monotonic() + LOAD_S

    async def ask() -> None:
        while time.monotonic() < end_s:
            prompt, tokens = expected[next(numbers) % len(expected)]
            answer = await complete(client, prompt, logprobs=0, max_tokens=LOAD_TOKENS)
            told = answer.headers["x-headwater-worker"]
            assert answer.json()["choices"][0]["logprobs"]["tokens"] == tokens, (prompt, told)
            workers[told.partition(".")[0]] += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(ask())
    return workers


@pytest.mark.soak
async def test_compare_finds_no_difference_but_rounding(mixed: Mixed, tmp_path: Path) -> None:
    """The same tokens, or others from a place on at which two were equally likely for both: as `compare` has it."""
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(
        b"\n".join(msgspec.json.encode({"prompt": one, "ignore_eos": True}) for one in prompts())
    )
    words = ("compare", MODEL, "--url", mixed.up.url, "--prompts", str(file), "--max-tokens", "24", "--json")
    code, text = await mixed.up.command(*words)
    assert code == 0, text
    found = msgspec.json.decode(text.splitlines()[-1])
    assert [(one["engine"], one["requests"], one["tokens"]) for one in found["engines"]] == [
        ("sglang", 8, 192),
        ("vllm", 8, 192),
    ]
    assert all(one["first_token_ms"]["p50"] > 0 for one in found["engines"])
    for one in found["prompts"]:
        divergence = one["divergence"]
        if divergence["equal_tokens"]:
            assert divergence["logprob_difference"] < 1e-3
        if divergence["position"] is not None:
            assert [gap for gap, _ in divergence["gaps"]] == pytest.approx([0.0, 0.0], abs=GAP_MAX)


async def test_both_engines_answer_alike(mixed: Mixed) -> None:
    """The same tokens, or others from a place on at which two were equally likely for both."""
    async with mixed.up.client() as client:
        for prompt in prompts():
            both = [await complete(client, prompt, worker, logprobs=2) for worker in (VLLM, SGLANG)]
            ours, theirs = (answer.json()["choices"][0]["logprobs"] for answer in both)
            pairs = list(zip(ours["tokens"], theirs["tokens"], strict=True))
            at = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
            for place in range(len(pairs) if at is None else at):
                assert ours["token_logprobs"][place] == pytest.approx(
                    theirs["token_logprobs"][place], abs=1e-3
                )
            if at is not None:
                for told in (ours, theirs):
                    first, second = sorted(told["top_logprobs"][at].values(), reverse=True)[:2]
                    assert first - second < GAP_MAX, (prompt, at)


async def test_explain_shows_both_candidates(mixed: Mixed) -> None:
    """The router compares workers of both engines, and finds a prompt's blocks with the one that has them.

    Which one it chooses depends on how long prompts took on either: on a busy machine to compute one may be faster than to find it.
    """
    prompt = [200 + (position * 7) % 900 for position in range(160)]
    async with mixed.up.client() as client:
        first = await complete(client, prompt, SGLANG, max_tokens=2)
        await mixed.up.until_indexed(5)
        again = await complete(client, [*prompt, 77], max_tokens=2)
        has_it = again.headers["x-headwater-worker"].startswith(SGLANG)
        cached = again.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == (160 if has_it else 0)
        assert first.json()["choices"][0]["text"]
        models = (await client.get("/v1/models")).json()["data"]
        assert [model["id"] for model in models] == [MODEL]
    code, text = await mixed.up.command("explain", again.headers["x-request-id"])
    assert code == 0, text
    assert re.search(rf"^.* {VLLM}\S* .* 0 of 5 ", text, re.M), text
    assert re.search(rf"^.* {SGLANG}\S* .* 5 of 5 ", text, re.M), text


async def test_a_capability_of_one_engine_is_routed_to_it(mixed: Mixed) -> None:
    """Bad words are vLLM's only: whoever has the blocks, it is the one that may take the request."""
    async with mixed.up.client() as client:
        answer = await complete(client, [300 + position for position in range(96)], bad_words=["zebra"])
    assert answer.headers["x-headwater-worker"].startswith(VLLM)


async def test_requests_move_to_sglang_and_back_without_an_error(mixed: Mixed) -> None:
    """A switch between backends: the weights change while requests run, and none of them notices."""
    prompt = [600 + (position * 17) % 900 for position in range(48)]
    async with mixed.up.client() as client:
        for shares, worker in ((("vllm=0", "sglang=1"), SGLANG), (("vllm=1", "sglang=0"), VLLM)):
            running = [asyncio.create_task(complete(client, prompt, max_tokens=96)) for _ in range(2)]
            await weights(mixed, *shares)
            after = await asyncio.gather(*(complete(client, prompt, max_tokens=4) for _ in range(4)))
            assert all(one.headers["x-headwater-worker"].startswith(worker) for one in after)
            for one in await asyncio.gather(*running):
                assert one.json()["usage"]["completion_tokens"] == 96
        _, text = await mixed.up.command("explain", after[-1].headers["x-request-id"])
        assert "engine vllm: drawn by weights sglang=0 vllm=1" in text
        await weights(mixed, "remove")


@pytest.mark.soak
@pytest.mark.timeout(1_800)
async def test_no_client_notices_that_workers_of_both_engines_are_killed(mixed: Mixed) -> None:
    """Five minutes of load: each answer is the one that both engines give undisturbed."""
    async with mixed.up.client() as client:
        expected = await certain_answers(client)
        # By cost alone, one engine may get nearly all.
        await weights(mixed, "vllm=1", "sglang=1")
        load = asyncio.create_task(answered_by(client, expected))
        for name, number in ((VLLM, signal.SIGKILL), (SGLANG, signal.SIGKILL), (VLLM, signal.SIGTERM)):
            await asyncio.wait({load}, timeout=LOAD_S / 4)
            os.kill(await mixed.up.worker_pid(name), number)
            await mixed.up.until(f"{name} is gone", lambda stats, name=name: name not in ready(stats))  # type: ignore[misc]
            await mixed.up.until("both workers", lambda stats: ready(stats) == {VLLM, SGLANG}, within_s=600)
        workers = await load
        await weights(mixed, "remove")
        after = await complete(client, expected[0].prompt)
    _, log = await mixed.up.command("log", "--requests")
    print(f"{sum(workers.values())} answers to {len(expected)} prompts, {dict(workers)}", log, sep="\n")
    assert min(workers[VLLM], workers[SGLANG]) > sum(workers.values()) // 20
    code, text = await mixed.up.command("explain", after.headers["x-request-id"])
    assert code == 0, text
    assert VLLM in text
    assert SGLANG in text


@pytest.mark.last
@pytest.mark.parametrize("process", ["scheduler", pytest.param("detokenizer", marks=pytest.mark.soak)])
async def test_a_death_of_sglang_is_continued_by_vllm(mixed: Mixed, process: str) -> None:
    """SIGKILL of one of its processes in the middle of an answer about an image: the client gets the whole answer, as from one engine.

    The last test, so that none waits for the next life of the worker.
    """
    await weights(mixed, "sglang=1", "vllm=1e-9")
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": content(picture_url(51), "What is this?")}],
        "max_tokens": 600,
        "temperature": 0,
        "ignore_eos": True,
    }
    text, killed, lives = "", False, mixed.sglang.lives
    async with mixed.up.client() as client:
        async with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
            assert response.status_code == 200
            assert response.headers["x-headwater-worker"].startswith(SGLANG)
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    assert '"error"' not in line, line
                    text += msgspec.json.decode(line[6:])["choices"][0]["delta"].get("content") or ""
                if text and not killed:
                    [doomed] = [
                        pid
                        for pid in descendants(mixed.sglang.pid)
                        if f"sglang::{process}" in command_line(pid)
                    ]
                    os.kill(doomed, signal.SIGKILL)
                    killed = True
        answer = await client.post("/v1/chat/completions", json=body, headers={"x-headwater-worker": VLLM})
        alone = answer.json()["choices"][0]["message"]["content"]
    assert killed
    assert text == alone
    async with asyncio.timeout(60):
        while mixed.sglang.lives == lives:
            await asyncio.sleep(0.05)
    assert '"sglang_died"' in mixed.sglang.log.read_text()
    # It would end only after its start, which on a busy machine takes longer than its end may.
    await mixed.until_ready()
