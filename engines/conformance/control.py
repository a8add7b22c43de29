"""Checks of control: pause, sleep, clear and embeddings; what is missing is rejected by name."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import numpy as np

from headwater.engines.conformance.case import ANSWER_TOKENS, EngineCase, eventually, rebuilt
from headwater.engines.conformance.check import Check, check, raises
from headwater.engines.engine import EngineError, NotSupported, PauseMode, RequestRejected
from headwater.schemas import hashing
from headwater.schemas.events.kv import BlocksCleared
from headwater.schemas.messages.inference import EmbedRequest

SETTLE_S = 0.1
"""In which an engine that was not stopped generates tokens."""


@check()
async def optional_call_that_an_engine_lacks_is_rejected_by_name(case: EngineCase) -> None:
    """With the name of the capability."""
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
    whole = (await case.generate(prompt, seed=5, max_tokens=40)).tokens
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
    assert (await late.ended()).tokens == whole[:4]
    if "kv_events" in engine.capabilities:
        assert late.cached_tokens == 2 * case.info.block_size, "the cache was not kept"
    if mode == "keep":
        await eventually(lambda: len(running.tokens) >= 40 or bool(running.finish))
        assert running.tokens[:40] == whole
        engine.abort(request.request)
        await running.ended()
    await case.idle()


def _pauses() -> tuple[Check, ...]:
    modes: tuple[PauseMode, ...] = ("abort", "wait", "keep")
    text = " ".join((_paused.__doc__ or "").split())
    return tuple(
        Check(f"pause with mode {mode}", text, partial(_paused, mode=mode), ("generate", "pause"))
        for mode in modes
    )


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
    """Of one length, the same again and in any company, different for other tokens; rejections by name."""
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


CHECKS = (
    optional_call_that_an_engine_lacks_is_rejected_by_name,
    *_pauses(),
    sleeping_engine_starts_nothing_and_wakes,
    sleeping_engine_holds_no_blocks,
    vectors_are_those_of_the_tokens,
)
