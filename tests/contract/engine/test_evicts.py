"""The `Engine` contract on a KV cache that is too small for everything."""

import pytest

from tests.support.ports.engines import MakeEngine, rebuilt, started
from tests.support.ports.waiting import eventually

pytestmark = pytest.mark.timeout(300)


async def test_full_cache_evicts_and_says_what(make_engine: MakeEngine) -> None:
    """More prompts than fit: removals are announced, the fold never contains more than there is, the newest stays."""
    async with started(make_engine(small=True)) as case:
        total, size = case.info.total_blocks, case.info.block_size
        blocks = min(total // 3, case.info.context_length // size - 2)
        prompts = [case.prompt(blocks + 0.5) for _ in range(total // blocks + 2)]
        for prompt in prompts:
            await case.generate(prompt, max_tokens=1)
            await case.holds(case.hashes(prompt))
            assert sum((+case.kv.held).values()) <= total
        assert not case.kv.holds(case.hashes(prompts[0]))
        await eventually(lambda: rebuilt(case) == +case.kv.held)
        assert (await case.generate(prompts[-1], max_tokens=1)).cached_tokens == blocks * size
        assert (await case.generate(prompts[0], max_tokens=1)).cached_tokens < blocks * size


async def test_requests_that_do_not_fit_together_all_end(make_engine: MakeEngine) -> None:
    """Running out of blocks delays requests and recomputes them; each gets its own length."""
    async with started(make_engine(small=True)) as case:
        prompts = [case.prompt(2.5) for _ in range(6)]
        length = case.info.total_blocks * case.info.block_size // 5 - len(prompts[0])
        alone = [(await case.generate(prompt, max_tokens=8, seed=3)).tokens for prompt in prompts]
        answers = [case.submit(case.request(prompt, max_tokens=length, seed=3)) for prompt in prompts]
        for answer in answers:
            await answer.ended(within_s=200)
        await case.idle()
        for answer, start in zip(answers, alone):
            assert [step.finish for step in answer.steps if step.finish] == ["length"]
            assert len(answer.tokens) == length
            # A real engine's sums depend a little on what else is in the batch.
            assert case.engine.name != "sim" or answer.tokens[:8] == start
        await eventually(lambda: rebuilt(case) == +case.kv.held)
