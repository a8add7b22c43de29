"""What only SGLang has, or only with arguments of its own: scores, tiers of its cache, retraction, diffusion models, profiles."""

import asyncio
import multiprocessing
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio

from headwater.engines.engine import RequestRejected
from headwater.engines.sglang import SglangOptions, launcher
from headwater.engines.sglang.sampling import Stream
from headwater.schemas import hashing
from headwater.schemas.events import CPU, GPU
from headwater.schemas.inference import EmbedRequest
from tests.support.engines import tiny_diffusion_model, tiny_model
from tests.support.engines.settings import engine_settings
from tests.support.marks import SGLANG_HERE
from tests.support.ports.engines import EOS, EngineCase, free_port, rebuilt, sglang_engine, started
from tests.support.ports.waiting import eventually

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300), *SGLANG_HERE]

TIERED = {
    "enable_hierarchical_cache": True,
    "hicache_ratio": 4.0,
    "hicache_write_policy": "write_through",
    # What a copy in PyTorch stands in for: tests/support/sglang/site.
    "hicache_io_backend": "direct",
    "hicache_mem_layout": "layer_first",
    "enable_priority_scheduling": True,
    "schedule_low_priority_values_first": True,
    "max_running_requests": 6,
    # It would admit fewer requests than it can retract.
    "schedule_conservativeness": 0.01,
}
BLOCKS = 4.5


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tiered(
    sglang_model: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[EngineCase, Path]]:
    """An engine with 20 blocks, four times as many in host memory, and priorities; and where its profiles go."""
    folder = tmp_path_factory.mktemp("profiles")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_TORCH_PROFILER_DIR", str(folder))
        async with started(sglang_engine(sglang_model, small=True, given=TIERED)) as case:
            yield case, folder


async def test_blocks_in_host_memory_are_counted_there(tiered: tuple[EngineCase, Path]) -> None:
    """A block is announced on both tiers, leaves the GPU when that is full, and comes back with the same answer."""
    case, _ = tiered
    prompts = [case.prompt(BLOCKS) for _ in range(8)]
    answers = [await case.generate(prompt) for prompt in prompts]
    first = case.hashes(prompts[0]).tolist()

    def tiers() -> list[tuple[int, int]]:
        return [(case.kv.held[0, GPU, block], case.kv.held[0, CPU, block]) for block in first]

    await eventually(lambda: tiers() == [(0, 1)] * 4)
    again = await case.generate(prompts[0])
    assert again.cached_tokens == 4 * case.info.block_size
    assert again.tokens == answers[0].tokens
    await eventually(lambda: tiers() == [(1, 1)] * 4)
    await eventually(lambda: rebuilt(case) == +case.kv.held)
    await case.engine.clear_kv()
    await eventually(lambda: not +case.kv.held)


async def test_retracted_requests_answer_as_undisturbed_ones(
    tiered: tuple[EngineCase, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six requests outgrow the cache: SGLang takes blocks from some, which compute them again and repeat no token."""
    case, _ = tiered
    retractions: dict[str, int] = {}
    take = Stream.take

    def counting(stream: Stream, chunk: dict[str, Any]) -> None:
        retractions[stream.rid] = chunk["meta_info"]["num_retractions"]
        take(stream, chunk)

    monkeypatch.setattr(Stream, "take", counting)
    # Of a request that ignores ends of answers it would reserve all blocks, and retract none.
    long: dict[str, Any] = {"max_tokens": 150, "ignore_eos": False, "logit_bias": {EOS: -100.0}}
    prompts = [case.prompt(1.5) for _ in range(6)]
    together = [case.submit(case.request(prompt, **long)) for prompt in prompts]
    for answer in together:
        await answer.ended()
    await case.idle()
    assert sum(retractions.values()) > 0
    retractions.clear()
    for prompt, answer in zip(prompts, together, strict=True):
        assert answer.tokens == (await case.generate(prompt, **long)).tokens
        assert answer.cached_tokens == 0
    assert sum(retractions.values()) == 0


async def test_urgent_requests_overtake(tiered: tuple[EngineCase, Path]) -> None:
    """While all places are taken: a lower number is served first, whenever it came."""
    case, _ = tiered
    running = [case.request(case.prompt(0.5), max_tokens=60) for _ in range(6)]
    answers = [case.submit(request) for request in running]
    for answer in answers:
        await answer.begun()
    order: list[int] = []

    async def number_when_begun(number: int) -> None:
        request = msgspec.structs.replace(case.request(case.prompt(0.5), max_tokens=1), priority=number)
        answer = case.submit(request)
        await answer.begun()
        order.append(number)

    async with asyncio.TaskGroup() as group:
        for number in (5, 3, 1):
            group.create_task(number_when_begun(number))
    for answer in answers:
        await answer.ended()
    assert order == [1, 3, 5]
    await case.idle()


async def test_a_profile_is_written(tiered: tuple[EngineCase, Path]) -> None:
    """Where SGLang's own variable says, when it is ended."""
    case, folder = tiered
    await case.engine.profile(on=True)
    await case.generate(case.prompt(0.5))
    await case.engine.profile(on=False)
    assert [path.name for path in folder.iterdir() if path.name.endswith(".trace.json.gz")]


async def test_scores_are_those_of_transformers(sglang_model: str) -> None:
    """A model with a head for one class: the score of a prompt is that of the same weights in the library that defines them."""
    folder = str(tiny_model.ensure_scorer())
    async with started(sglang_engine(folder, max_model_len=512)) as case:
        assert case.info.tasks == ("classify", "score")
        prompts = [case.prompt(0.5), case.prompt(1.5)]
        packed = tuple(map(hashing.pack_tokens, prompts))
        found = await case.engine.embed(EmbedRequest("r1", packed, "score"))
        shares = await case.engine.embed(EmbedRequest("r2", packed, "classify"))
        assert list(map(score_of, shares)) == pytest.approx(list(map(score_of, found)), abs=1e-5)
        with pytest.raises(RequestRejected, match="'embed' is not supported"):
            await case.engine.embed(EmbedRequest("r3", packed))
    import torch
    from transformers import LlamaForSequenceClassification

    model = LlamaForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    # Not set by transformers where SGLang was imported.
    model.model.rotary_emb.inv_freq = 10_000.0 ** -(torch.arange(0, 32, 2) / 32)
    for prompt, vector in zip(prompts, found, strict=True):
        with torch.no_grad():
            hidden = model.model(torch.tensor([prompt])).last_hidden_state[0, -1]
        wanted = torch.sigmoid(model.score(hidden)).item()
        assert score_of(vector) == pytest.approx(wanted, abs=1e-5)


def score_of(vector: bytes) -> float:
    """The only number of a vector."""
    [number] = np.frombuffer(vector, "<f4").tolist()
    return float(number)


async def test_a_second_node_computes_and_ends_with_the_first(
    sglang_model: str, tiered: tuple[EngineCase, Path]
) -> None:
    """Each has half of every matrix: answers are those of one node. The second has no requests, and no place in a fleet."""
    address = f"127.0.0.1:{free_port()}"

    def native(node: int) -> tuple[str, ...]:
        return (
            "--skip-tokenizer-init",
            "--tp-size=2",
            "--nnodes=2",
            f"--node-rank={node}",
            f"--dist-init-addr={address}",
        )

    settings = engine_settings(SglangOptions(native=native(1)), sglang_model, name="w1")
    second = multiprocessing.get_context("fork").Process(target=launcher.follow, args=(settings,))
    second.start()
    async with started(sglang_engine(sglang_model, native=native(0))) as case:
        prompt = case.prompt(2.5)
        both = await case.generate(prompt)
        assert second.is_alive()
    await eventually(lambda: not second.is_alive())
    assert second.exitcode == 0
    assert (await tiered[0].generate(prompt)).tokens == both.tokens


async def test_a_diffusion_model_answers_in_blocks(sglang_model: str) -> None:
    """Several tokens in one step, as many as were asked for; an answer repeats, and an abort ends it."""
    given = {"dllm_algorithm": "LowConfidence"}
    engine = sglang_engine(str(tiny_diffusion_model.ensure()), max_model_len=512, given=given)
    async with started(engine) as case:
        prompt = case.prompt(4.5)
        answer = await case.generate(prompt, max_tokens=23)
        sizes = [len(step.tokens) for step in answer.steps]
        assert (len(answer.tokens), answer.finish) == (23, "length")
        assert max(sizes) == tiny_diffusion_model.BLOCK
        assert 0 not in sizes[1:-1]
        assert (await case.generate(prompt, max_tokens=23)).tokens == answer.tokens
        await case.holds(case.hashes(prompt))
        request, running = await case.running(200)
        case.engine.abort(request.request)
        assert (await running.ended()).finish == "abort"
        await case.idle()
