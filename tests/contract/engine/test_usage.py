"""The `Engine` contract on what the usage of a request is made of: its counts are those of the KV events."""

from typing import Any

import pytest

from headwater.actors.edge.prompt.request import written_tokens
from tests.contract.engine.test_kv import stored_blocks
from tests.support.ports.engines import EngineCase

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]


@pytest.mark.parametrize(("shared", "own"), [(0, 3.5), (0, 0.5), (2, 1.5), (3, 0.5), (2, 2), (3, 0)])
async def test_written_tokens_are_the_stored_blocks(
    engine_case: EngineCase, shared: float, own: float
) -> None:
    """Of a prompt with a cached beginning: `cache_write_tokens` is what the log shows as stored by this request."""
    size = engine_case.info.block_size
    prefix = engine_case.prompt(shared)
    if prefix:
        await engine_case.generate(prefix, max_tokens=1)
        await engine_case.holds(engine_case.hashes(prefix))
    before = len(engine_case.kv.events)
    prompt = prefix + engine_case.prompt(own)
    answer = await engine_case.generate(prompt, max_tokens=1)
    hashes = engine_case.hashes(prompt)
    await engine_case.holds(hashes)
    # Something else that is stored: events come in order, so those of the prompt are there by then.
    later = engine_case.prompt(1.5)
    await engine_case.generate(later, max_tokens=1)
    await engine_case.holds(engine_case.hashes(later))
    stored = [block for _, block in stored_blocks(engine_case.kv.events[before:])]
    written = sum(size for block in stored if block in hashes.tolist())
    counted = written_tokens(len(prompt), answer.cached_tokens, size)
    if engine_case.engine.name != "vllm" and not own:
        # They compute the last block of a wholly cached prompt again, as vLLM does, but keep the older copy.
        assert (counted, written) == (size, 0)
    else:
        assert counted == written


async def test_without_a_count_nothing_is_said_to_be_written() -> None:
    """An engine that does not tell what was cached, or has not yet."""
    assert written_tokens(100, -1, 16) == 0


async def test_prompt_logprobs_are_those_of_the_prompt(engine_case: EngineCase) -> None:
    """One for each token but the first, with the likeliest ones in order; told once."""
    if "prompt_logprobs" not in engine_case.engine.capabilities:
        pytest.skip("the engine does not tell log probabilities of prompts")
    prompt = engine_case.prompt(1.5)
    for _ in range(2):
        answer = await engine_case.generate(prompt, max_tokens=4, prompt_logprobs=2)
        told = [step.prompt_logprobs for step in answer.steps if step.prompt_logprobs]
        assert len(told) == 1
        assert answer.steps[0].prompt_logprobs
        first, *rest = told[0]
        assert first is None
        assert len(rest) == len(prompt) - 1
        for token, score in zip(prompt[1:], rest, strict=True):
            assert score is not None
            assert len(score.top) == 2
            assert score.logprob == dict(score.top).get(token, score.logprob)
            assert score.logprob <= score.top[0][1]


async def test_bad_words_do_not_occur(engine_case: EngineCase) -> None:
    """A greedy answer changes where its first token is forbidden."""
    if "bad_words" not in engine_case.engine.capabilities:
        pytest.skip("the engine does not know bad words")
    engine: Any = engine_case.engine
    tokenizer = engine._engine.get_tokenizer()
    words = {number: tokenizer.decode([number]) for number in range(1_000, 2_000)}
    plain = [
        number for number, word in words.items() if word.isalpha() and tokenizer.encode(word) == [number]
    ]
    either = tuple(plain[:2])
    prompt = engine_case.prompt(1.5)
    [usual] = (await engine_case.generate(prompt, max_tokens=1, allowed_token_ids=either)).tokens
    changed = await engine_case.generate(
        prompt, max_tokens=1, allowed_token_ids=either, bad_words=(words[usual],)
    )
    assert {usual, *changed.tokens} == set(either)
