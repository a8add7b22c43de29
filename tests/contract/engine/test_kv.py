"""The `Engine` contract on the KV cache: the shipped checks."""

import pytest

from headwater.engines.conformance import cache
from headwater.engines.conformance.cache import stored_blocks
from headwater.engines.conformance.case import Check, checks_of
from tests.support.ports.conformance import hold, parametrized
from tests.support.ports.engines import EngineCase, MakeEngine
from tests.support.sglang import environment

__all__ = ["stored_blocks"]

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]


@parametrized(checks_of(cache), "one")
async def test_cache(engine_case: EngineCase, one: Check) -> None:
    await hold(one, engine_case)


async def test_prompts_that_start_in_one_step_are_computed_once(engine_case: EngineCase) -> None:
    """The blocks of a step are cached when it is planned, by vLLM and the simulated engine. (SGLang does when the step has ended.)

    While the first prompt is computed the others arrive, and start together.
    """
    if environment.HERE:
        pytest.skip("sglang caches the blocks of a step when it has ended")
    size = engine_case.info.block_size
    prefix = engine_case.prompt(3)
    prompts = [engine_case.prompt(3.5), *(prefix + engine_case.prompt(0.5) for _ in range(3))]
    answers = [engine_case.submit(engine_case.request(prompt, max_tokens=2)) for prompt in prompts]
    for answer in answers:
        await answer.ended()
    assert sorted(answer.cached_tokens for answer in answers) == [0, 0, 3 * size, 3 * size]


@parametrized(checks_of(cache), "new")
async def test_small_cache(make_engine: MakeEngine, one: Check) -> None:
    await one.run(make_engine)
