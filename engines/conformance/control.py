"""Checks of control (pause, sleep, clear, embeddings) and of LoRA adapters; what is missing is rejected by name.

Unless adapters are given as files, the engine gets only names. An engine that reads files rejects those: give it two adapters.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import numpy as np

from headwater.engines.conformance.case import (
    ANSWER_TOKENS,
    Check,
    EngineCase,
    Inapplicable,
    check,
    eventually,
    raises,
    rebuilt,
)
from headwater.engines.engine import EngineError, NotSupported, PauseMode, RequestRejected
from headwater.schemas import hashing
from headwater.schemas.events import BlocksCleared
from headwater.schemas.inference import EmbedRequest

SETTLE_S = 0.1
"""A time in which an engine that was not stopped generates tokens."""


@check()
async def optional_call_that_an_engine_lacks_is_rejected_by_name(case: EngineCase) -> None:
    """Call each optional method that the engine lacks; the rejection names the capability."""
    engine = case.engine
    calls: dict[str, tuple[Callable[[], Awaitable[object]], ...]] = {
        "sleep": (lambda: engine.sleep(1), engine.wake),
        "pause": (lambda: engine.pause("keep"), engine.resume),
        "profile": (lambda: engine.profile(on=True), lambda: engine.profile(on=False)),
        "handoff": (lambda: engine.release("r", b"{}"),),
        "embed": (lambda: engine.embed(EmbedRequest("r", (hashing.pack_tokens([1]),))),),
        "lora": (lambda: engine.unload_lora("unknown"),),
    }
    for capability, makes in calls.items():
        for make in makes:
            if capability not in engine.capabilities:
                with raises(NotSupported, capability):
                    await make()


async def _paused(case: EngineCase, mode: PauseMode) -> None:
    """What ran is aborted, ends, or continues where it was; what comes after it waits; answers stay the same."""
    engine, prompt = case.engine, case.prompt(3)
    uninterrupted = (await case.generate(prompt, seed=5, max_tokens=40)).tokens
    length = 24 if mode == "wait" else min(ANSWER_TOKENS, case.info.context_length // 2)
    request = case.request(prompt, seed=5, max_tokens=length)
    running = case.submit(request)
    await running.begun()
    await engine.pause(mode)
    if mode != "keep":
        await running.ended()
        assert running.finish in (("abort", "stop") if mode == "abort" else ("length", "stop"))
    # Tokens of the step that it was in may still be on their way.
    await asyncio.sleep(SETTLE_S)
    reached = len(running.steps)
    late = case.submit(case.request(prompt, seed=5, max_tokens=4))
    await engine.check()
    await asyncio.sleep(SETTLE_S)
    assert (len(running.steps), late.steps) == (reached, [])
    await engine.resume()
    assert (await late.ended()).tokens == uninterrupted[:4]
    if "kv_events" in engine.capabilities:
        assert late.cached_tokens == 2 * case.info.block_size, "the cache was not kept"
    if mode == "keep":
        await eventually(lambda: len(running.tokens) >= 40 or bool(running.finish))
        assert running.tokens[:40] == uninterrupted
        engine.abort(request.request)
        await running.ended()
    await case.idle()


def _pause(mode: PauseMode) -> Check:
    text = " ".join((_paused.__doc__ or "").split())
    return Check(f"pause with mode {mode}", text, partial(_paused, mode=mode), ("generate", "pause"))


pause_and_abort, pause_and_wait, pause_and_keep = _pause("abort"), _pause("wait"), _pause("keep")


@check("generate", "sleep")
async def sleeping_engine_starts_nothing_and_wakes(case: EngineCase) -> None:
    """It rejects unknown levels, running requests and a second sleep; awake it answers as before."""
    engine, prompt = case.engine, case.prompt(2.5)
    before = await case.generate(prompt, seed=5)
    with raises(EngineError, "level 3"):
        await engine.sleep(3)
    request, running = await case.running()
    with raises(EngineError, "running"):
        await engine.sleep(1)
    engine.abort(request.request)
    await running.ended()
    await case.idle()
    await engine.sleep(1)
    with raises(EngineError, "is already asleep"):
        await engine.sleep(1)
    late = case.submit(case.request(prompt, seed=5))
    await engine.check()
    await asyncio.sleep(SETTLE_S)
    assert not late.steps
    await engine.wake()
    assert (await late.ended()).tokens == before.tokens
    await case.idle()


@check("generate", "sleep", "kv_events", "kv_dump")
async def sleeping_engine_holds_no_blocks(case: EngineCase) -> None:
    """The cache is gone at once for readers of the events, and is empty after the wake."""
    prompt = case.prompt(2.5)
    await case.generate(prompt)
    await case.holds(case.hashes(prompt))
    # A request counts as running for a moment after its final step.
    await case.idle()
    await case.engine.sleep(1)
    await eventually(lambda: not +case.kv.held)
    assert isinstance(case.kv.events[-1], BlocksCleared)
    assert not rebuilt(case)
    await case.engine.wake()
    assert (await case.generate(prompt)).cached_tokens == 0
    await case.holds(case.hashes(prompt))


@check("embed")
async def vectors_are_those_of_the_tokens(case: EngineCase) -> None:
    """Vectors have one length, are the same again and in any company, and differ for other tokens; rejections name the capability."""
    prompts = [case.prompt(blocks) for blocks in (0.5, 1.5, 1.5)]
    packed = tuple(map(hashing.pack_tokens, prompts))
    vectors = await case.engine.embed(EmbedRequest("e1", packed))
    arrays = [np.frombuffer(vector, "<f4") for vector in vectors]
    assert len(arrays) == len(prompts)
    assert len({len(array) for array in arrays}) == 1
    assert not np.allclose(arrays[1], arrays[2])
    [alone] = await case.engine.embed(EmbedRequest("e2", packed[1:2]))
    assert np.allclose(np.frombuffer(alone, "<f4"), arrays[1], atol=1e-3)
    with raises(RequestRejected, "supported: "):
        await case.engine.embed(EmbedRequest("e3", packed, task="no such task"))
    for wrong in ([], prompts[0] * (case.info.context_length + 1)):
        with raises(RequestRejected, "tokens"):
            await case.engine.embed(EmbedRequest("e4", (hashing.pack_tokens(wrong),)))
    assert "embed" in case.info.tasks
    if "generate" not in case.engine.capabilities:
        with raises(NotSupported, "generate"):
            case.submit(case.request(prompts[0]))
    await case.idle()


# Checks of LoRA adapters: answers and cached blocks of their own, slots, and what is rejected.

SLOTS_MIN = 2


@asynccontextmanager
async def _loaded(case: EngineCase, *names: str) -> AsyncIterator[None]:
    """Adapters under these names, each with weights of its own; unloaded at the end."""
    if case.info.lora_slots < SLOTS_MIN:
        raise Inapplicable(f"it has {case.info.lora_slots} LoRA slots, the check needs {SLOTS_MIN}")
    try:
        for number, name in enumerate(names):
            try:
                await case.engine.load_lora(case.adapter(name, number))
            except EngineError as error:
                if case.has_adapter_files:
                    raise
                raise Inapplicable(f"it loads no adapter without files: {error}") from error
        yield
    finally:
        for name in names:
            await case.engine.unload_lora(name)


@check("generate", "lora")
async def adapters_answer_each_in_its_own_way(case: EngineCase) -> None:
    """Other tokens than each other and the base model; an unloaded one is rejected, and loading twice is fine."""
    names = ("north", "south")
    async with _loaded(case, *names):
        for number, name in enumerate(names):
            await case.engine.load_lora(case.adapter(name, number))
        prompt = case.prompt(2.5)
        answers = [(await case.generate(prompt, lora=name, seed=5)).tokens for name in ("", *names)]
        assert len({tuple(tokens) for tokens in answers}) == 3, "two of them answer in the same way"
        for name, tokens in zip(("", *names), answers, strict=True):
            assert (await case.generate(prompt, lora=name, seed=5)).tokens == tokens
        await case.engine.unload_lora("north")
        with raises(RequestRejected, "south"):
            case.submit(case.request(prompt, lora="north"))
        assert (await case.generate(prompt, lora="south", seed=5)).tokens == answers[2]
    assert (await case.generate(prompt, seed=5)).tokens == answers[0]


@check("generate", "lora", "kv_events")
async def adapters_share_no_blocks(case: EngineCase) -> None:
    """The same prompt is computed once per adapter, and its blocks have names of their own."""
    names, size = ("north", "south"), case.info.block_size
    async with _loaded(case, *names):
        prompt = case.prompt(2.5)
        for name in ("", *names):
            assert (await case.generate(prompt, lora=name)).cached_tokens == 0
            await case.holds(case.hashes(prompt, lora=name))
            assert (await case.generate(prompt, lora=name)).cached_tokens == 2 * size


@check("generate", "lora")
async def adapters_run_side_by_side(case: EngineCase) -> None:
    """Requests of both and of the base model at once answer as alone."""
    names = ("east", "west")
    async with _loaded(case, *names):
        prompt = case.prompt(1.5)
        every = ("", *names)
        alone = [(await case.generate(prompt, lora=name, seed=5)).tokens for name in every]
        answers = [case.submit(case.request(prompt, lora=name, seed=5)) for name in every]
        for answer, expected in zip(answers, alone, strict=True):
            assert (await answer.ended()).tokens == expected
        await case.idle()


@check("generate", "lora")
async def adapter_that_cannot_be_loaded_leaves_nothing(case: EngineCase) -> None:
    """Too large a rank, no free slot: an error that says so, and requests for it are rejected."""
    with raises(EngineError, "rank"):
        await case.engine.load_lora(case.adapter("wide", 1, 2 * case.info.lora_rank_max))
    adapter_names = [f"slot-{number}" for number in range(case.info.lora_slots)]
    async with _loaded(case, *adapter_names):
        with raises(EngineError, "slot-0"):
            await case.engine.load_lora(case.adapter("late", 9))
    for name in ("wide", "late"):
        with raises(RequestRejected, "loaded"):
            case.submit(case.request(case.prompt(1), lora=name))
