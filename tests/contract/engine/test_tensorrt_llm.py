"""The `Engine` contract over the TensorRT-LLM adapter, with a double of the library: no package of it can be installed here."""

from collections.abc import Iterator
from contextlib import AsyncExitStack
from math import exp, log
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from headwater.engines import ranked
from headwater.engines.conformance.case import rebuilt, started
from headwater.engines.conformance.suite import ConformanceRun
from headwater.engines.engine import Engine, LoraAdapter, RequestRejected, Transfer
from headwater.engines.model_files import byte_model_files, byte_tokenizer
from headwater.engines.sim import ZERO
from headwater.engines.tensorrt_llm import HandoffMode, TensorRtOptions
from headwater.engines.tensorrt_llm.engine import TensorRtEngine
from headwater.ops.start.metrics import Labelled
from tests.support.engines.settings import engine_settings
from tests.support.ports.waiting import eventually
from tests.support.tensorrt_llm.double import World, installed
from tests.support.tensorrt_llm.metrics import MetricsCollector
from tests.support.tensorrt_llm.tensors import VOCABULARY, Tensor

pytestmark = pytest.mark.timeout(120)

DISAGGREGATED = {
    "max_seq_len": 8_192,
    "cache_transceiver_config": {
        "backend": "DEFAULT",
        "max_tokens_in_buffer": 8_192,
        "kv_transfer_timeout_ms": 60_000,
    },
}
UNSUPPORTED = {"clear_kv", "embed", "pause"}
"""What TensorRT-LLM's API has no call for, among what the suite checks."""


@pytest.fixture
def world() -> Iterator[World]:
    """The double, installed."""
    with installed(World(step_time=ZERO)) as made:
        yield made


def engine(
    world: World,
    mode: HandoffMode = "context-first",
    processors: dict[str, str] | None = None,
    **overrides: object,
) -> TensorRtEngine:
    """An engine that can hand over."""
    settings = engine_settings(
        TensorRtOptions(
            handoff=mode, logits_processors=processors or {}, overrides={**DISAGGREGATED, **overrides}
        ),
        files=byte_model_files("model")._replace(eos_token_ids=(2,), vocabulary=VOCABULARY),
    )
    return TensorRtEngine(settings, world.clock)


class Only:
    """A logits processor: one token and no other."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, req_id: int, logits: Any, *_: Any) -> None:
        """See TensorRT-LLM's `LogitsProcessor`."""
        logits[..., self.token] += 1000.0


@pytest.mark.parametrize("mode", ["context-first", "opaque"])
async def test_suite_passes(world: World, mode: HandoffMode) -> None:
    """Every check but those of what its API lacks."""

    def make(*, small: bool = False) -> Engine:
        world.sim["total_blocks"] = 20 if small else 4_096
        lora = {"max_loras": 2, "max_lora_rank": 8}
        return engine(world, mode, enable_lora=True, lora_config=lora)

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
        ranks = [await stack.enter_async_context(started(one)) for one in ranked.split(made)]
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


async def test_bias_and_allowed_tokens_outside_the_vocabulary_are_rejected(world: World) -> None:
    async with started(engine(world)) as case:
        wrong: list[dict[str, Any]] = [
            {"logit_bias": {VOCABULARY: 1.0}},
            {"allowed_token_ids": (VOCABULARY,)},
        ]
        for given in wrong:
            with pytest.raises(
                RequestRejected, match=f"token {VOCABULARY} is not in the vocabulary"
            ) as caught:
                case.submit(case.request(case.prompt(1), **given))
            assert caught.value.param in given
        both: dict[str, Any] = {"logit_bias": {9: 50.0}, "allowed_token_ids": (8, 9)}
        assert (await case.generate(case.prompt(1), **both)).tokens == [9] * 8


async def test_processors_and_bad_words_need_an_engine_without_kv_events(world: World) -> None:
    """By name; a word of several tokens is allowed up to its last one. Events and processors freeze the engine (3857)."""
    assert engine(world).possible >= {"bad_words", "processors"}
    async with started(engine(world)) as case:
        assert not case.engine.capabilities & {"bad_words", "processors"}
    world.sim["script"] = tuple(byte_tokenizer().encode("where a river begins ").ids)
    only = {"only": f"{__name__}:Only"}
    async with started(engine(world, processors=only)) as case:
        assert "kv_events" not in case.engine.capabilities
        assert case.info.processors == ("only",)
        prompt = case.prompt(1.5)
        assert (await case.generate(prompt, processors={"only": {"token": 77}})).tokens == [77] * 8
        with pytest.raises(RequestRejected, match="known are: only"):
            case.submit(case.request(prompt, processors={"other": {}}))
        free = (await case.generate(prompt)).tokens
        word = byte_tokenizer().decode(free[2:4])
        assert len(byte_tokenizer().encode(word, add_special_tokens=False).ids) > 1
        banned = (await case.generate(prompt, bad_words=(word,))).tokens
        assert banned[:3] == free[:3]
        assert banned[3] != free[3]


async def test_prompt_logprobs_are_those_of_the_prompts_own_tokens(world: World) -> None:
    """Also of a prompt that is in the cache: its tokens are computed again, under a salt that nobody else has."""
    async with started(engine(world)) as case:
        prompt = [token + 256 for token in case.prompt(2.5)]
        await case.generate(prompt)
        for count in (0, 2):
            answer = await case.generate(prompt, prompt_logprobs=count)
            [step] = [one for one in answer.steps if one.prompt_logprobs]
            assert step is answer.steps[0]
            first, *others = step.prompt_logprobs
            assert first is None
            total = log(exp(6) + exp(5) + VOCABULARY - 2)
            for token, one in zip(prompt[1:], others, strict=True):
                assert one is not None
                assert one.logprob == pytest.approx(5 - total, abs=1e-4)
                assert [number for number, _ in one.top] == [7, token][:count]
        assert answer.cached_tokens == 0
        world.sim["script"] = ()
        without = await case.generate(prompt)
        assert without.cached_tokens > 0, "the cache was not in the way: the test shows nothing"


async def test_missing_logits_fail_the_request_and_not_the_engine(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tests.support.tensorrt_llm.double.logits_of", lambda request: Tensor(np.zeros((3, 9)))
    )
    async with started(engine(world)) as case:
        answer = await case.generate(case.prompt(2), prompt_logprobs=1)
        assert (answer.finish, answer.tokens) == ("error", [])
        assert "the logits of 3 of 64 prompt tokens" in answer.steps[-1].detail
        await case.engine.check()
        assert (await case.generate(case.prompt(1))).finish == "length"


async def test_its_own_metrics_are_next_to_ours_with_the_workers_labels(world: World) -> None:
    """Of iterations and of ended requests, from the registry of this process."""
    async with started(engine(world)) as case:
        await case.generate(case.prompt(1))

        def samples() -> dict[str, Any]:
            families = Labelled(lambda: {"worker": "w0"}).collect()
            # The registry is the process's: other tests' models are in it, too.
            own = (
                one
                for family in families
                for one in family.samples
                if one.labels.get("model_name") == "model"
            )
            return {one.name: one.labels for one in own}

        await eventually(lambda: "trtllm_request_success_total" in samples())
        found = samples()
    assert found["trtllm_request_success_total"] | {"finished_reason": "length"} == {
        "worker": "w0",
        "model_name": "model",
        "engine_type": "trtllm",
        "finished_reason": "length",
    }
    assert found["trtllm_kv_cache_utilization"]["worker"] == "w0"


async def test_metrics_that_fail_cost_the_metrics_only(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("kvCacheStats")

    monkeypatch.setattr(MetricsCollector, "log_iteration_stats", fail)
    async with started(engine(world)) as case:
        with capture_logs() as lines:
            await case.generate(case.prompt(1))
        assert (await case.generate(case.prompt(1))).finish == "length"
        await case.engine.check()
    assert [line["event"] for line in lines].count("engine_metrics_failed") <= 1
