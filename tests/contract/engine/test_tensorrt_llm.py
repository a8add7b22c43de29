"""The `Engine` contract over the TensorRT-LLM adapter, with a double of the library: no package of it can be installed here."""

from collections.abc import Iterator
from contextlib import AsyncExitStack

import pytest

from headwater.engines import data_parallel
from headwater.engines.conformance.case import rebuilt, started
from headwater.engines.conformance.suite import ConformanceRun
from headwater.engines.engine import Engine, LoraAdapter, RequestRejected, Transfer
from headwater.engines.sim.step_time import ZERO
from headwater.engines.tensorrt_llm.config.settings import HandoffMode, TensorRtSettings
from headwater.engines.tensorrt_llm.engine import TensorRtEngine
from tests.support.ports.waiting import eventually
from tests.support.tensorrt_llm.double import World, installed

pytestmark = pytest.mark.timeout(120)

DISAGGREGATED = {
    "max_seq_len": 8_192,
    "cache_transceiver_config": {
        "backend": "DEFAULT",
        "max_tokens_in_buffer": 8_192,
        "kv_transfer_timeout_ms": 60_000,
    },
}
UNSUPPORTED = {
    "clear_kv",
    "embed",
    "pause",
    "logit_bias",
    "allowed_tokens",
}
"""What TensorRT-LLM's API has no call for, among what the suite checks."""


@pytest.fixture
def world() -> Iterator[World]:
    """The double, installed."""
    with installed(World(step_time=ZERO)) as made:
        yield made


def engine(world: World, mode: HandoffMode = "context-first", **overrides: object) -> TensorRtEngine:
    """An engine that can hand over."""
    settings = TensorRtSettings(
        "model", "model", "w0", eos_token_ids=(2,), handoff=mode, overrides={**DISAGGREGATED, **overrides}
    )
    return TensorRtEngine(settings, world.clock)


@pytest.mark.parametrize("mode", ["context-first", "opaque"])
async def test_suite_passes(world: World, mode: HandoffMode) -> None:
    """Every check but those of what its API lacks."""

    def make(*, small: bool = False) -> Engine:
        world.sim["total_blocks"] = 20 if small else 4_096
        return engine(world, mode)

    results = [one async for one in ConformanceRun(make).results()]
    assert [one for one in results if one.outcome in ("failed", "inapplicable")] == []
    lacks = {name for one in results if one.outcome == "unsupported" for name in one.detail.split(", ")}
    assert lacks == UNSUPPORTED


async def test_generation_first_runs_both_legs_at_once(world: World) -> None:
    """The decode leg starts with what the prefill leg announced before it computed anything."""
    async with AsyncExitStack() as stack:
        first, second = [
            await stack.enter_async_context(started(engine(world, "generation-first"))) for _ in range(2)
        ]
        prompt = first.prompt(2.5)
        alone = (await first.generate(prompt, max_tokens=6)).tokens
        prefill = first.submit(first.request(prompt, leg="prefill"))
        await eventually(lambda: bool(prefill.steps))
        pinned = prefill.steps[0].pinned
        assert pinned is not None
        assert prefill.steps[0].finish == ""
        transfer = Transfer(pinned.params)
        decode = second.submit(second.request(prompt, leg="decode", max_tokens=6), transfer)
        assert (await decode.ended()).tokens == alone
        await prefill.ended()
        assert [step.pinned for step in prefill.steps[1:]] == [None] * (len(prefill.steps) - 1)
        assert prefill.finish == "length"
        again = second.submit(second.request(prompt, leg="decode"), transfer)
        assert (await again.ended()).finish == "error"


async def test_attention_ranks_are_targets_of_their_own(world: World) -> None:
    """Each has its requests, its blocks and its events; a request is never moved to another one."""
    made = engine(world, tensor_parallel_size=2, enable_attention_dp=True)
    assert made.ranks == 2
    async with AsyncExitStack() as stack:
        ranks = [await stack.enter_async_context(started(one)) for one in data_parallel.split(made)]
        first, second = ranks
        prompt = first.prompt(2.5)
        await first.generate(prompt)
        await first.holds(first.hashes(prompt))
        assert not +second.kv.held
        assert (await second.generate(prompt)).cached_tokens == 0
        await second.holds(second.hashes(prompt))
        await eventually(lambda: all(rebuilt(one) == +one.kv.held for one in ranks))


async def test_adapters_have_slots_and_blocks_of_their_own(world: World) -> None:
    """TensorRT-LLM loads an adapter with its first request: the table and its limits are ours."""
    lora = {"max_loras": 1, "max_lora_rank": 8}
    async with started(engine(world, enable_lora=True, lora_config=lora)) as case:
        prompt = case.prompt(2.5)
        with pytest.raises(RequestRejected, match="is loaded here; loaded are: none"):
            case.submit(case.request(prompt, lora="north"))
        await case.engine.load_lora(LoraAdapter("north", "/north", 4))
        for wrong, message in (("wide", "rank 9"), ("late", "in use: north")):
            with pytest.raises(Exception, match=message):
                await case.engine.load_lora(LoraAdapter(wrong, "/x", 9 if wrong == "wide" else 4))
        await case.generate(prompt)
        assert (await case.generate(prompt, lora="north")).cached_tokens == 0
        await case.holds(case.hashes(prompt, lora="north"))
        await case.engine.unload_lora("north")
        with pytest.raises(RequestRejected, match="is loaded here"):
            case.submit(case.request(prompt, lora="north"))


async def test_prompts_beyond_max_num_tokens_are_rejected_unless_chunked(world: World) -> None:
    """It computes a prompt in one piece, or refuses it."""
    for chunked in (False, True):
        async with started(engine(world, max_num_tokens=64, enable_chunked_prefill=chunked)) as case:
            long = case.request(case.prompt(3), max_tokens=1)
            if chunked:
                assert (await case.submit(long).ended()).finish == "length"
            else:
                with pytest.raises(RequestRejected, match=r"max_num_tokens \(64\)"):
                    case.submit(long)
