"""The real engine through the whole system, asked by the official OpenAI client."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from tests.support.clients.pictures import picture_url
from tests.support.marks import VLLM
from tests.support.processes.fleet import FleetProcess, stream_text

pytestmark = [*VLLM, pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(300)]

MODEL = "tiny"
STORY_TOKENS = 450
"""Takes the tiny model a second: long enough to be interrupted."""

CORE_STREAMS = 6

PROMPTS = ["The capital of France is", "One, two, three,"]
FRANCE: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest_asyncio.fixture(loop_scope="package")
async def client(up: FleetProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's own client, without its retries: an error is seen, not repeated."""
    async with up.official_client() as made:
        yield made


async def test_streamed_and_whole_answers_are_the_same(client: openai.AsyncOpenAI) -> None:
    """Same text, same finish, same usage; the role comes first."""
    whole = await client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0, max_tokens=6)
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=FRANCE,
        temperature=0,
        max_tokens=6,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 6


async def test_completions_take_text_tokens_and_several_prompts(client: openai.AsyncOpenAI) -> None:
    """/v1/completions: one choice per prompt, in order."""
    answer = await client.completions.create(model=MODEL, prompt=PROMPTS, temperature=0, max_tokens=3)
    assert [choice.index for choice in answer.choices] == [0, 1]
    each = [
        await client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=3)
        for prompt in PROMPTS
    ]
    assert [choice.text for choice in answer.choices] == [one.choices[0].text for one in each]
    assert answer.choices[0].text != answer.choices[1].text
    by_tokens = await client.completions.create(model=MODEL, prompt=[504, 3575], temperature=0, max_tokens=2)
    assert by_tokens.usage is not None
    assert by_tokens.usage.prompt_tokens == 2


async def test_choices_seeds_and_stop_strings(client: openai.AsyncOpenAI) -> None:
    """`n` gives that many choices, a seed repeats them, a stop string ends before itself."""
    once, again = [
        await client.chat.completions.create(
            model=MODEL, messages=FRANCE, n=2, seed=5, temperature=1, max_tokens=12
        )
        for _ in range(2)
    ]
    assert [c.message.content for c in once.choices] == [c.message.content for c in again.choices]
    assert once.choices[0].message.content != once.choices[1].message.content
    whole = await client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0, max_tokens=12)
    text = whole.choices[0].message.content or ""
    stop = text[len(text) // 2 :][:4]
    assert stop
    stopped = await client.chat.completions.create(
        model=MODEL, messages=FRANCE, temperature=0, max_tokens=12, stop=[stop]
    )
    assert stopped.choices[0].message.content == text[: text.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"


async def test_logprobs_come_from_the_engine(client: openai.AsyncOpenAI) -> None:
    """One entry per token, alternatives ordered, and at temperature 0 the likeliest is the chosen one."""
    answer = await client.chat.completions.create(
        model=MODEL, messages=FRANCE, temperature=0, max_tokens=4, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content) == answer.choices[0].message.content
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0
    legacy = await client.completions.create(
        model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=2, logprobs=2
    )
    found = legacy.choices[0].logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.text_offset == [0, len(found.tokens[0])]


async def test_errors_are_the_clients_own_kinds(client: openai.AsyncOpenAI) -> None:
    """The official client raises its own exceptions, naming what is wrong."""
    with pytest.raises(openai.NotFoundError, match="not served here"):
        await client.chat.completions.create(model="gpt-9", messages=FRANCE)
    with pytest.raises(openai.BadRequestError, match="maximum context length is 2048"):
        await client.completions.create(model=MODEL, prompt="a " * 3000, max_tokens=5)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        await client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=9)
    with pytest.raises(openai.BadRequestError, match="vocabulary"):
        await client.completions.create(model=MODEL, prompt=[10**6], max_tokens=1)
    assert [model.id async for model in client.models.list()] == [MODEL]


PREFIX = "Rivers begin where water gathers, and every map of a river is a map of decisions. " * 35


async def test_a_long_prefix_is_found_again_also_by_a_restarted_router(
    up: FleetProcess, client: openai.AsyncOpenAI
) -> None:
    """600 common tokens: the router knows which worker has them, and the engine says so itself.

    The worker is named: the tiny model computes 600 tokens within what the learned step times of two workers differ by.
    """

    async def ask(question: str, worker: str) -> tuple[str, int, int, int]:
        raw = await client.chat.completions.with_raw_response.create(
            model=MODEL,
            temperature=0,
            max_tokens=4,
            messages=[{"role": "system", "content": PREFIX}, {"role": "user", "content": question}],
            extra_headers={"x-headwater-worker": worker} if worker else {},
        )
        usage = raw.parse().usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        cached = usage.prompt_tokens_details.cached_tokens or 0
        expected = int(raw.headers["x-headwater-cached-blocks"])
        return raw.headers["x-headwater-worker"], usage.prompt_tokens, expected, cached

    known = await up.blocks()
    worker, tokens, expected, cached = await ask("Where does it begin?", "")
    await up.until_indexed(known + 600 // 32)
    assert tokens > 600
    assert expected == cached == 0
    _, _, expected, cached = await ask("Where does it end?", worker)
    assert expected >= 600 // 32
    assert cached >= 600 // 32 * 32
    before = up.kill(" router ")
    await up.until("a new router", lambda _: up.pids(" router ") not in ([], [before]))
    _, _, expected, cached = await ask("Who draws the map?", worker)
    assert expected >= 600 // 32
    assert cached >= 600 // 32 * 32
    other = "worker-0" if worker == "worker-1" else "worker-1"
    _, _, expected, cached = await ask("Who reads it?", other)
    assert expected == cached == 0


async def test_a_killed_worker_costs_no_client_its_answer(up: FleetProcess) -> None:
    """Kill -9 under two streams about an image at temperature 0: each answer is the one an undisturbed run gives.

    The other worker fetches the image from the edge.
    """
    picture: Any = {"type": "image_url", "image_url": {"url": picture_url(31)}}
    body: dict[str, Any] = {
        "model": MODEL,
        "temperature": 0,
        "max_tokens": STORY_TOKENS,
        "ignore_eos": True,
        "messages": [
            {"role": "user", "content": [picture, {"type": "text", "text": "Tell me a story about this."}]}
        ],
    }
    before = await up.until("both workers", lambda stats: sum("epoch" in one for one in stats) >= 2)
    async with up.client() as http:
        expected, _, _ = await stream_text(http, body)
        killing: list[asyncio.Task[int]] = []

        def on_text(chunks: int) -> None:
            if chunks == 8 and not killing:
                killing.append(asyncio.create_task(_kill_a_busy_worker(up)))

        async with asyncio.timeout(120):
            answers = await asyncio.gather(*(stream_text(http, body, on_text) for _ in range(2)))
    await killing[0]
    for text, finish, usage in answers:
        assert text == expected
        assert (finish, usage["completion_tokens"]) == ("length", STORY_TOKENS)
    lives = {one["id"]: one["epoch"] for one in before if "epoch" in one}
    await up.until(
        "both workers are back",
        lambda stats: (
            sum(s["name"] == "headwater-worker" and s["state"] == "ready" for s in stats) == 2
            and lives != {one["id"]: one["epoch"] for one in stats if "epoch" in one}
        ),
        within_s=60,
    )


@pytest.mark.soak
async def test_a_killed_engine_core_costs_no_client_its_answer(up: FleetProcess) -> None:
    """SIGKILL of vLLM's own process while its worker's lives on: streams and requests that come later are answered as without it.

    In every run `test_disaggregated.py` kills such a process.
    """
    body: dict[str, Any] = {
        "model": MODEL,
        "temperature": 0,
        "max_tokens": STORY_TOKENS,
        "ignore_eos": True,
        "messages": [{"role": "user", "content": "Tell me a story about a river."}],
    }
    await up.until_whole()
    async with up.client() as http:
        expected, _, _ = await stream_text(http, body)
        killing: list[asyncio.Task[int]] = []

        def on_text(chunks: int) -> None:
            if chunks == 8 and not killing:
                killing.append(asyncio.create_task(_kill_a_busy_core(up)))

        async def later() -> tuple[str, str, dict[str, Any]]:
            while not killing or not killing[0].done():
                await asyncio.sleep(0.01)
            return await stream_text(http, body)

        async with asyncio.timeout(120):
            streams = [stream_text(http, body, on_text) for _ in range(CORE_STREAMS)]
            answers = await asyncio.gather(*streams, *(later() for _ in range(CORE_STREAMS)))
    await killing[0]
    for text, finish, usage in answers:
        assert text == expected
        assert (finish, usage["completion_tokens"]) == ("length", STORY_TOKENS)
    # Its worker is back for the tests that follow.
    await up.until_whole(within_s=120)


async def _kill_a_busy_core(up: FleetProcess) -> int:
    return await up.kill_engine(await _busy_worker(up), "EngineCore")


async def _busy_worker(up: FleetProcess) -> str:
    stats = await up.until(
        "a request runs on a worker", lambda stats: any(one.get("running") for one in stats)
    )
    name: str = max(stats, key=lambda one: one.get("running", 0))["id"]
    return name


async def _kill_a_busy_worker(up: FleetProcess) -> int:
    return await up.kill_worker(await _busy_worker(up))
