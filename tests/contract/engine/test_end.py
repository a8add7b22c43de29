"""The `Engine` contract on ending: a stop leaves nothing behind, and a death is told."""

import os
import signal

import pytest

from headwater.engines.engine import EngineDied
from tests.support.ports.engines import (
    ONLY_TOKEN,
    MakeEngine,
    MakeRealEngine,
    alive,
    death_of,
    family,
    started,
)
from tests.support.ports.waiting import eventually

pytestmark = pytest.mark.timeout(600)

LONG = 3_000


async def test_stop_aborts_what_runs_and_leaves_no_process(make_engine: MakeEngine) -> None:
    """Every request gets its last step, the one just submitted too, and the engine's processes are gone."""
    before = family()
    async with started(make_engine()) as case:
        running = [case.submit(case.request(case.prompt(1.5), max_tokens=LONG)) for _ in range(3)]
        await eventually(lambda: all(answer.tokens for answer in running))
        ours = family().keys() - before.keys()
        fresh = case.submit(case.request(case.prompt(1.5), max_tokens=LONG))
        await case.engine.stop()
        for answer in (*running, fresh):
            await answer.ended()
            assert [step.finish for step in answer.steps if step.finish] == ["abort"]
    await eventually(lambda: not any(map(alive, ours)))


async def test_stop_is_fine_twice_and_before_the_start(make_engine: MakeEngine) -> None:
    """Whoever cleans up need not know how far a start had come."""
    engine = make_engine()
    await engine.stop()
    await engine.stop()


async def test_killed_process_is_told_and_ends_its_requests(make_real_engine: MakeRealEngine) -> None:
    """SIGKILL of the process that computes: `check` says it within seconds, requests end with an error.

    A dead engine takes no request: it says so at once, instead of taking one that it can only end. Its worker refuses it, and it runs elsewhere.
    """
    before = family()
    async with started(make_real_engine()) as case:
        await case.engine.check()
        ours = {pid: name for pid, name in family().items() if pid not in before}
        running = [case.submit(case.request(case.prompt(1.5), max_tokens=LONG)) for _ in range(3)]
        await eventually(lambda: all(answer.tokens for answer in running))
        (computing,) = [pid for pid, name in ours.items() if "EngineCor" in name or "sglang::sch" in name]
        os.kill(computing, signal.SIGKILL)
        assert f"process {computing} was ended by SIGKILL" in await death_of(case.engine)
        for answer in running:
            await answer.ended()
            assert [step.finish for step in answer.steps if step.finish] == ["died"]
            assert answer.steps[-1].detail
        with pytest.raises(EngineDied, match=f"process {computing} was ended by SIGKILL"):
            case.submit(case.request(case.prompt(1.5)))
    await eventually(lambda: not any(map(alive, ours)))


async def test_the_first_cause_of_a_death_is_told(make_real_engine: MakeRealEngine) -> None:
    """An exception in the engine's process, by its name and message: to its requests, and by `check`."""
    async with started(make_real_engine(logits_processors={"only": ONLY_TOKEN})) as case:
        running = case.submit(case.request(case.prompt(1.5), max_tokens=LONG))
        await running.begun()
        fatal = case.submit(case.request(case.prompt(1.5), processors={"only": {"token": -1}}))
        for answer in (running, fatal):
            await answer.ended()
            assert answer.finish == "died"
            assert "LookupError: no token -1" in answer.steps[-1].detail
        with pytest.raises(EngineDied, match="LookupError: no token -1"):
            await case.engine.check()
