"""Data-parallel ranks of one vLLM or SGLang: engines of their own, started and stopped once."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import cast

import pytest
import pytest_asyncio

from headwater.engines import ranked
from headwater.engines.ranked import RankedEngine
from headwater.engines.sglang.engine import SglangEngine
from tests.support.ports.engines import (
    EngineCase,
    death_of,
    family,
    rebuilt,
    sglang_engine,
    started,
    vllm_engine,
)
from tests.support.ports.waiting import eventually
from tests.support.sglang import environment

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(600),
    pytest.mark.sglang if environment.HERE else pytest.mark.vllm,
    pytest.mark.xdist_group("vllm"),
    # Its own libraries' are not ours to fail on.
    pytest.mark.filterwarnings("ignore"),
]

RANKS = 2


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest) -> RankedEngine:
    """The engine that is installed here, with two ranks."""
    if environment.HERE:
        made = sglang_engine(
            request.getfixturevalue("sglang_model"), max_model_len=512, given={"dp_size": RANKS}
        )
    else:
        model = request.getfixturevalue("vllm_model")
        made = vllm_engine(
            model, max_model_len=512, kv_cache_mib=64, native=(f"--data-parallel-size={RANKS}",)
        )
    return cast(RankedEngine, made)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def cases(engine: RankedEngine) -> AsyncIterator[list[EngineCase]]:
    """Both ranks of it."""
    before = set(family())
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(started(rank)) for rank in ranked.split(engine)]
    await eventually(lambda: not set(family()) - before)


async def test_each_rank_has_a_cache_of_its_own(cases: list[EngineCase]) -> None:
    """What one computed is announced by it alone, found by it alone, and dumped by it alone."""
    first, second = cases
    assert first.info == second.info
    prompt = first.prompt(2.5)
    before = +second.kv.held
    answer = await first.generate(prompt)
    await first.holds(first.hashes(prompt))
    assert +second.kv.held == before
    assert (await second.generate(prompt)).cached_tokens == 0
    await second.holds(second.hashes(prompt))
    again = await first.generate(prompt)
    assert again.cached_tokens == 2 * first.info.block_size
    assert again.tokens == answer.tokens
    for case in cases:
        await eventually(lambda: rebuilt(case) == +case.kv.held)  # noqa: B023 (awaited at once)


async def test_each_rank_has_a_load_of_its_own(cases: list[EngineCase]) -> None:
    """And an abort by another rank does not reach it."""
    busy, idle = cases
    request = busy.request(busy.prompt(1.5), max_tokens=400)
    answer = busy.submit(request)
    await eventually(lambda: busy.engine.load().running == 1 and busy.engine.load().used_blocks > 0)
    assert idle.engine.load()[:3] == (0, 0, 0)
    assert idle.engine.load().total_blocks == busy.engine.load().total_blocks == busy.info.total_blocks
    idle.engine.abort(request.request)
    reached = len(answer.tokens)
    await eventually(lambda: len(answer.tokens) > reached)
    busy.engine.abort(request.request)
    await answer.ended()
    await busy.idle()


async def test_clear_by_one_rank_is_told_by_all(cases: list[EngineCase]) -> None:
    """VLLM clears them together."""
    for case in cases:
        prompt = case.prompt(1.5)
        await case.generate(prompt)
        await case.holds(case.hashes(prompt))
    await cases[0].engine.clear_kv()
    for case in cases:
        await eventually(lambda: not +case.kv.held)  # noqa: B023 (awaited at once)
        prompt = case.prompt(1.5)
        await case.generate(prompt)
        await case.holds(case.hashes(prompt))


async def test_pause_waits_for_every_rank(cases: list[EngineCase]) -> None:
    """One rank told: the other goes on. Both told: neither. One resumed: both."""
    first, second = cases
    await first.engine.pause("keep")
    await second.generate(second.prompt(0.5))
    await second.engine.pause("keep")
    late = second.submit(second.request(second.prompt(0.5)))
    await first.engine.check()
    assert not late.steps
    await first.engine.resume()
    await late.ended()
    await second.engine.resume()
    await second.idle()


async def test_engine_lives_until_its_last_rank_stops_or_one_dies(
    engine: RankedEngine, cases: list[EngineCase]
) -> None:
    """A stopped rank ends its own requests only; a killed one is told to the other. The last test of this engine."""
    first, second = cases
    mine = first.submit(first.request(first.prompt(0.5), max_tokens=400))
    other = second.submit(second.request(second.prompt(0.5), max_tokens=30))
    await eventually(lambda: bool(mine.tokens))
    async with asyncio.timeout(20):
        await first.engine.stop()
        await first.engine.stop()
    assert mine.finish == "abort"
    assert (await other.ended()).finish == "length"
    await second.engine.check()
    if isinstance(engine, SglangEngine):
        await kill_a_scheduler(engine, second)


async def kill_a_scheduler(engine: SglangEngine, case: EngineCase) -> None:
    """SGLang itself watches the controller of its ranks only: the adapter notices the death of a rank's process."""
    assert engine._process is not None
    pid = next(pid for pid, name in family().items() if pid in engine._process._pids and "::sch" in name)
    running = case.submit(case.request(case.prompt(0.5), max_tokens=400))
    await running.begun()
    os.kill(pid, signal.SIGKILL)
    assert f"process {pid} ended" in await death_of(case.engine)
    await running.ended()
    assert running.finish == "died"
