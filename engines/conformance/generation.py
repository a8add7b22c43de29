"""Checks of generation: steps, how they end, and what is rejected."""

import asyncio
import time

from headwater.engines.conformance.case import ANSWER_TOKENS, Answer, EngineCase, check, eventually, raises
from headwater.engines.engine import NotSupported, RequestRejected
from headwater.engines.process import BLOCKED_S, LoopWatch
from headwater.schemas.inference import Guide

ABORT_S = 5.0
"""Soon: next to an engine that continues for 3,000 tokens, on a machine that has other things to do."""


@check("generate")
async def length_ends_an_answer_with_exactly_one_last_step(case: EngineCase) -> None:
    """`max_tokens` tokens, then one step with `length`, and nothing after it."""
    answer = await case.generate(case.prompt(1.5), max_tokens=7)
    assert len(answer.tokens) == 7
    assert [step.finish for step in answer.steps] == [""] * (len(answer.steps) - 1) + ["length"]
    assert all(step.detail == "" for step in answer.steps)


@check("generate")
async def one_token_is_one_step(case: EngineCase) -> None:
    """The first step may be the last; of a new prompt nothing is cached."""
    answer = await case.generate(case.prompt(1.5), max_tokens=1)
    [step] = answer.steps
    assert (len(step.tokens), step.finish) == (1, "length")
    assert step.cached_tokens == 0 or (
        step.cached_tokens == -1 and "kv_events" not in case.engine.capabilities
    )


@check("generate")
async def stop_token_ends_an_answer(case: EngineCase) -> None:
    """The stop token is the last one of the answer, and what is before it is as without it."""
    prompt = case.prompt(1.5)
    free = (await case.generate(prompt, max_tokens=12, seed=3)).tokens
    stop = free[6]
    answer = await case.generate(prompt, max_tokens=12, seed=3, stop_token_ids=(stop,))
    assert answer.finish == "stop"
    assert answer.tokens == free[: free.index(stop) + 1]


@check("generate")
async def greedy_answers_repeat(case: EngineCase) -> None:
    """The same prompt and seed give the same tokens, from the cache or not."""
    prompt = case.prompt(2.5)
    first = await case.generate(prompt, max_tokens=12, seed=3)
    for _ in range(2):
        assert (await case.generate(prompt, max_tokens=12, seed=3)).tokens == first.tokens


@check("generate", "seed")
async def seed_repeats_a_random_answer(case: EngineCase) -> None:
    """The same seed gives the same answer, another one another."""
    prompt = case.prompt(1.5)
    answers = [
        (await case.generate(prompt, max_tokens=16, temperature=1.0, seed=seed)).tokens
        for seed in (11, 11, 12)
    ]
    assert answers[0] == answers[1]
    assert answers[0] != answers[2]


@check("generate")
async def requests_at_once_each_get_their_own(case: EngineCase) -> None:
    """A batch of requests of different lengths: one end each, and the lengths that were requested."""
    lengths = [1 + 5 * number for number in range(8)]
    answers = [case.submit(case.request(case.prompt(2.5), max_tokens=length)) for length in lengths]
    for answer in answers:
        await answer.ended()
    await case.idle()
    assert [len(answer.tokens) for answer in answers] == lengths
    for answer in answers:
        assert [step.finish for step in answer.steps if step.finish] == ["length"]
        assert answer.steps[-1].finish


@check("generate")
async def aborted_request_ends_soon_and_leaves_the_engine(case: EngineCase) -> None:
    """Its last step says abort, soon; its place in the engine is free again."""
    request, answer = await case.running()
    began = time.monotonic()
    case.engine.abort(request.request)
    await answer.ended()
    assert time.monotonic() - began < ABORT_S
    assert answer.finish == "abort"
    steps = len(answer.steps)
    await case.idle()
    await case.generate(case.prompt(1.5))
    assert len(answer.steps) == steps


@check("generate")
async def request_aborted_at_once_still_gets_its_last_step(case: EngineCase) -> None:
    """However early the abort comes: exactly one step, which says so."""
    request = case.request(case.prompt(1.5), max_tokens=min(ANSWER_TOKENS, case.info.context_length // 2))
    answer = case.submit(request)
    case.engine.abort(request.request)
    await answer.ended()
    await case.idle()
    assert [step.finish for step in answer.steps] == ["abort"]


@check("generate")
async def abort_of_the_unknown_and_the_ended_is_ignored(case: EngineCase) -> None:
    """An abort may come too late, and twice."""
    request = case.request(case.prompt(1.5), max_tokens=2)
    answer = await case.submit(request).ended()
    for _ in range(2):
        case.engine.abort(request.request)
        case.engine.abort("unknown")
    await case.generate(case.prompt(1.5))
    assert [step.finish for step in answer.steps if step.finish] == ["length"]


@check("generate")
async def request_that_can_never_work_is_rejected(case: EngineCase) -> None:
    """Too long or empty: rejected at once by name, and `emit` is never called."""
    context, size = case.info.context_length, case.info.block_size
    long = (case.prompt(1) * (context // size + 1))[: context + 1]
    answer = Answer()
    for prompt, tokens in ((long, 1), (long[: context - 5], 6), ([], 4)):
        with raises(RequestRejected):
            case.engine.submit(case.request(prompt, max_tokens=tokens), answer.emit)
    await case.generate(case.prompt(1.5))
    assert not answer.steps
    assert case.engine.load()[:2] == (0, 0)


@check("generate")
async def event_loop_stays_free(case: EngineCase) -> None:
    """Code that blocks it belongs into a thread or a process: the worker could neither renew its lease nor answer."""
    watch = LoopWatch(case.engine.name, blocked_s=BLOCKED_S)
    watch.start()
    try:
        answers = [case.submit(case.request(case.prompt(2.5), max_tokens=8)) for _ in range(2)]
        for answer in answers:
            await answer.ended()
    finally:
        watch.stop()
    # The watch may end with the block that it reports.
    await asyncio.sleep(BLOCKED_S / 4)
    for block in watch.blocks:
        raise AssertionError(
            f"blocked for {block.seconds:.1f} s by {block.function}, {block.file}:{block.line}"
        )


@check("generate")
async def load_shows_running_and_then_idle(case: EngineCase) -> None:
    """What runs is counted with its blocks while it runs, and not any more afterwards."""
    assert case.engine.load()[:2] == (0, 0)
    running = [await case.running() for _ in range(2)]
    if any(answer.finish for _, answer in running):
        # The second one took so long to begin that the first has ended.
        running = [await case.running()]
    await eventually(lambda: case.engine.load().running == len(running))
    await eventually(lambda: case.engine.load().used_blocks >= len(running))
    load = case.engine.load()
    assert load.used_blocks <= load.total_blocks == case.info.total_blocks
    for request, _ in running:
        case.engine.abort(request.request)
    for _, answer in running:
        await answer.ended()
    await case.idle()


@check("generate", "logprobs")
async def logprobs_are_those_of_the_tokens(case: EngineCase) -> None:
    """One for each token with the likeliest ones in order; a greedy choice is the likeliest."""
    answer = await case.generate(case.prompt(1.5), max_tokens=6, logprobs=3)
    for step in answer.steps:
        assert len(step.logprobs) == len(step.tokens)
        for token, score in zip(step.tokens, step.logprobs):
            values = [value for _, value in score.top]
            assert len(score.top) == 3
            assert values == sorted(values, reverse=True)
            assert score.top[0] == (token, score.logprob)
            assert score.logprob <= 0
    assert all(not step.logprobs for step in (await case.generate(case.prompt(1.5))).steps)


@check("generate", "logprobs")
async def random_choice_has_its_own_logprob(case: EngineCase) -> None:
    """The chosen token is reported apart from the likeliest ones, and may be none of them."""
    answer = await case.generate(case.prompt(1.5), max_tokens=12, logprobs=2, temperature=1.5, seed=1)
    for step in answer.steps:
        for token, score in zip(step.tokens, step.logprobs, strict=True):
            assert len(score.top) == 2
            likeliest = dict(score.top)
            assert score.logprob == likeliest.get(token, score.logprob)
            assert score.logprob <= max(likeliest.values())


@check("generate", "logit_bias")
async def logit_bias_decides(case: EngineCase) -> None:
    """A large enough bias makes one token the only one."""
    answer = await case.generate(case.prompt(1.5), max_tokens=4, logit_bias={77: 100.0})
    assert answer.tokens == [77] * 4


@check("generate", "allowed_tokens")
async def allowed_tokens_are_the_only_ones(case: EngineCase) -> None:
    """Whatever the model prefers."""
    answer = await case.generate(case.prompt(1.5), max_tokens=8, allowed_token_ids=(55, 66))
    assert set(answer.tokens) <= {55, 66}


@check("generate")
async def what_an_engine_lacks_is_rejected_by_name(case: EngineCase) -> None:
    """Every optional part of a request, with the name of its capability."""
    prompt = case.prompt(1.5)
    requests = {
        "guide": case.request(prompt, guide=Guide("choice", '["a", "b"]')),
        "processors": case.request(prompt, processors={"only": {"token": 5}}),
        "logprobs": case.request(prompt, logprobs=1),
        "prompt_logprobs": case.request(prompt, prompt_logprobs=1),
        "logit_bias": case.request(prompt, logit_bias={5: 1.0}),
        "handoff": case.request(prompt, leg="prefill"),
        "lora": case.request(prompt, lora="unknown"),
    }
    for capability, request in requests.items():
        if capability not in case.engine.capabilities:
            with raises(NotSupported, capability):
                case.submit(request)


@check()
async def living_engine_passes_its_check(case: EngineCase) -> None:
    """Idle or running."""
    await case.engine.check()
    if "generate" not in case.engine.capabilities:
        return
    request, answer = await case.running()
    await asyncio.wait_for(case.engine.check(), 10)
    case.engine.abort(request.request)
    await answer.ended()
    await case.idle()
