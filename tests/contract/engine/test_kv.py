"""The `Engine` contract on the KV cache: the shipped checks."""

import pytest

from headwater.engines.conformance import cache
from headwater.engines.conformance.cache import stored_blocks
from headwater.engines.conformance.check import Check
from tests.support.ports.conformance import hold, parametrized
from tests.support.ports.engines import EngineCase, MakeEngine

__all__ = ["stored_blocks"]

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(300),
]


@parametrized(cache.CHECKS, "one")
async def test_cache(engine_case: EngineCase, one: Check) -> None:
    await hold(one, engine_case)


@parametrized(cache.CHECKS, "new")
async def test_small_cache(make_engine: MakeEngine, one: Check) -> None:
    await one.run(make_engine)
