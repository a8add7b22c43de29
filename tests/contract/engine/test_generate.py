"""The `Engine` contract on generation: steps, how they end, and what is refused."""

import asyncio
import time

import pytest

from headwater.engines.engine import RequestRejected
from tests.support.ports.engines import EOS, Answer, EngineCase
from tests.support.ports.waiting import eventually

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(300),
]

ABORT_S = 5.0
"""Soon: beside an engine that goes on for 3,000 tokens, on a machine that has other things to do."""
LONG = 3_000

# "<|im_start|>user\nSay hi.<|im_end|>\n<|im_start|>assistant\n" for the small model.
CHAT = [1, 4093, 198, 36218, 15876, 30, 2, 198, 1, 520, 9531, 198]


async def test_length_ends_an_answer_with_exactly_one_last_step(engine_case: EngineCase) -> None:
    """`max_tokens` tokens, then one step with `length`, and nothing after it."""
    answer = await engine_case.generate(engine_case.prompt(1.5), max_tokens=7)
    assert len(answer.tokens) == 7
    assert [step.finish for step in answer.steps] == [""] * (len(answer.steps) - 1) + ["length"]
    assert all(step.detail == "" for step in answer.steps)


async def test_one_token_is_one_step(engine_case: EngineCase) -> None:
    """The first step may be the last."""
    answer = await engine_case.generate(engine_case.prompt(1.5), max_tokens=1)
    [step] = answer.steps
    assert (len(step.tokens), step.finish, step.cached_tokens) == (1, "length", 0)


async def test_stop_token_ends_an_answer(engine_case: EngineCase) -> None:
    """The stop token is the last one of the answer, and what is before it is as without it."""
    prompt = engine_case.prompt(1.5)
    free = (await engine_case.generate(prompt, max_tokens=12, seed=3)).tokens
    stop = free[6]
    answer = await engine_case.generate(prompt, max_tokens=12, seed=3, stop_token_ids=(stop,))
    assert answer.finish == "stop"
    assert answer.tokens == free[: free.index(stop) + 1]


async def test_end_of_answer_stops_and_can_be_ignored(engine_case: EngineCase) -> None:
    """The model's own end token means stop, unless the request says to go on."""
    ended = await engine_case.generate(CHAT, max_tokens=300, seed=3, ignore_eos=False)
    assert ended.finish == "stop"
    assert ended.tokens[-1] == EOS
    more = len(ended.tokens) + 20
    ignored = await engine_case.generate(CHAT, max_tokens=more, seed=3, ignore_eos=True)
    assert (ignored.finish, len(ignored.tokens)) == ("length", more)
    assert ignored.tokens[: len(ended.tokens) - 1] == ended.tokens[:-1]


async def test_greedy_answers_repeat(engine_case: EngineCase) -> None:
    """The same prompt and seed give the same tokens, from the cache or not."""
    prompt = engine_case.prompt(2.5)
    first = await engine_case.generate(prompt, max_tokens=12, seed=3)
    for _ in range(2):
        assert (await engine_case.generate(prompt, max_tokens=12, seed=3)).tokens == first.tokens


async def test_seed_repeats_a_random_answer(engine_case: EngineCase) -> None:
    """Where an engine says that it knows seeds."""
    if "seed" not in engine_case.engine.capabilities:
        pytest.skip("the engine does not know seeds")
    prompt = engine_case.prompt(1.5)
    answers = [
        (await engine_case.generate(prompt, max_tokens=16, temperature=1.0, seed=seed)).tokens
        for seed in (11, 11, 12)
    ]
    assert answers[0] == answers[1]
    assert answers[0] != answers[2]


async def test_requests_at_once_each_get_their_own(engine_case: EngineCase) -> None:
    """A batch of requests of different lengths: one end each, and the lengths that were asked for."""
    lengths = [1 + 5 * number for number in range(8)]
    answers = [
        engine_case.submit(engine_case.request(engine_case.prompt(1.5), max_tokens=length))
        for length in lengths
    ]
    for answer in answers:
        await answer.ended()
    await engine_case.idle()
    assert [len(answer.tokens) for answer in answers] == lengths
    for answer in answers:
        assert [step.finish for step in answer.steps if step.finish] == ["length"]
        assert answer.steps[-1].finish


async def test_aborted_request_ends_soon_and_leaves_the_engine(engine_case: EngineCase) -> None:
    """Its last step says abort, soon; its place in the engine is free again."""
    request = engine_case.request(engine_case.prompt(1.5), max_tokens=LONG)
    answer = engine_case.submit(request)
    await answer.begun()
    began = time.monotonic()
    engine_case.engine.abort(request.request)
    await answer.ended()
    assert time.monotonic() - began < ABORT_S
    assert answer.finish == "abort"
    steps = len(answer.steps)
    await engine_case.idle()
    await engine_case.generate(engine_case.prompt(1.5))
    assert len(answer.steps) == steps


async def test_request_aborted_at_once_still_gets_its_last_step(engine_case: EngineCase) -> None:
    """However early the abort comes: exactly one step, which says so."""
    request = engine_case.request(engine_case.prompt(1.5), max_tokens=LONG)
    answer = engine_case.submit(request)
    engine_case.engine.abort(request.request)
    await answer.ended()
    await engine_case.idle()
    assert [step.finish for step in answer.steps] == ["abort"]


async def test_abort_of_the_unknown_and_the_ended_is_ignored(engine_case: EngineCase) -> None:
    """An abort may come too late, and twice."""
    request = engine_case.request(engine_case.prompt(1.5), max_tokens=2)
    answer = await engine_case.submit(request).ended()
    for _ in range(2):
        engine_case.engine.abort(request.request)
        engine_case.engine.abort("nobody")
    await engine_case.generate(engine_case.prompt(1.5))
    assert [step.finish for step in answer.steps if step.finish] == ["length"]


async def test_request_that_can_never_work_is_rejected(engine_case: EngineCase) -> None:
    """Too long or empty: said at once by name, and `emit` is never called."""
    context, size = engine_case.info.context_length, engine_case.info.block_size
    long = (engine_case.prompt(1) * (context // size + 1))[: context + 1]
    answer = Answer()
    for prompt, tokens in ((long, 1), (long[: context - 5], 6), ([], 4)):
        with pytest.raises(RequestRejected):
            engine_case.engine.submit(engine_case.request(prompt, max_tokens=tokens), answer.emit)
    await engine_case.generate(engine_case.prompt(1.5))
    assert not answer.steps
    assert engine_case.engine.load()[:2] == (0, 0)


async def test_load_shows_running_and_then_idle(engine_case: EngineCase) -> None:
    """What runs is counted with its blocks while it runs, and not any more afterwards."""
    assert engine_case.engine.load()[:2] == (0, 0)
    requests = [engine_case.request(engine_case.prompt(2.5), max_tokens=LONG) for _ in range(2)]
    answers = [engine_case.submit(request) for request in requests]
    await eventually(lambda: engine_case.engine.load().running == 2)
    await eventually(lambda: engine_case.engine.load().used_blocks >= 4)
    load = engine_case.engine.load()
    assert load.used_blocks <= load.total_blocks == engine_case.info.total_blocks
    for request in requests:
        engine_case.engine.abort(request.request)
    for answer in answers:
        await answer.ended()
    await engine_case.idle()


async def test_logprobs_are_those_of_the_tokens(engine_case: EngineCase) -> None:
    """One for each token with the likeliest ones in order; a greedy choice is the likeliest."""
    if "logprobs" not in engine_case.engine.capabilities:
        pytest.skip("the engine does not tell log probabilities")
    answer = await engine_case.generate(engine_case.prompt(1.5), max_tokens=6, logprobs=3)
    for step in answer.steps:
        assert len(step.logprobs) == len(step.tokens)
        for token, told in zip(step.tokens, step.logprobs):
            values = [value for _, value in told.top]
            assert len(told.top) == 3
            assert values == sorted(values, reverse=True)
            assert told.top[0] == (token, told.logprob)
            assert told.logprob <= 0
    assert all(not step.logprobs for step in (await engine_case.generate(engine_case.prompt(1.5))).steps)


async def test_random_choice_tells_its_own_logprob(engine_case: EngineCase) -> None:
    """The chosen token is told apart from the likeliest ones, and may be none of them."""
    if "logprobs" not in engine_case.engine.capabilities:
        pytest.skip("the engine does not tell log probabilities")
    answer = await engine_case.generate(
        engine_case.prompt(1.5), max_tokens=12, logprobs=2, temperature=1.5, seed=1
    )
    for step in answer.steps:
        for token, told in zip(step.tokens, step.logprobs, strict=True):
            assert len(told.top) == 2
            likeliest = dict(told.top)
            assert told.logprob == likeliest.get(token, told.logprob)
            assert told.logprob <= max(likeliest.values())


async def test_logit_bias_decides(engine_case: EngineCase) -> None:
    """A large enough bias makes one token the only one."""
    if "logit_bias" not in engine_case.engine.capabilities:
        pytest.skip("the engine does not know logit biases")
    answer = await engine_case.generate(engine_case.prompt(1.5), max_tokens=4, logit_bias={777: 100.0})
    assert answer.tokens == [777] * 4


async def test_living_engine_passes_its_check(engine_case: EngineCase) -> None:
    """Idle or busy."""
    await engine_case.engine.check()
    request = engine_case.request(engine_case.prompt(1.5), max_tokens=LONG)
    answer = engine_case.submit(request)
    await answer.begun()
    await asyncio.wait_for(engine_case.engine.check(), 10)
    engine_case.engine.abort(request.request)
    await answer.ended()
