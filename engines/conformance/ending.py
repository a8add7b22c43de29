"""Checks of ending: a stop leaves nothing behind."""

from headwater.engines.conformance.case import EngineCase, Inapplicable, MakeEngine, started
from headwater.engines.conformance.check import check
from headwater.engines.engine import EngineDied


@check("generate", subject="new")
async def stop_aborts_what_runs(make: MakeEngine) -> None:
    """Every request gets its last step, the one just submitted too."""
    async with started(make()) as case:
        running = [await case.running() for _ in range(2)]
        if any(answer.finish for _, answer in running):
            raise Inapplicable("its answers end too soon to be interrupted")
        fresh = case.submit(case.request(case.prompt(1.5), max_tokens=100))
        await case.engine.stop()
        for answer in (*(answer for _, answer in running), fresh):
            await answer.ended()
            assert [step.finish for step in answer.steps if step.finish] == ["abort"]


@check(subject="new")
async def stop_is_fine_twice_and_before_the_start(make: MakeEngine) -> None:
    """Whatever cleans up need not know how far a start had come."""
    engine = make()
    await engine.stop()
    await engine.stop()


async def has_died(case: EngineCase) -> bool:
    """Does the engine say that it has died?"""
    try:
        await case.engine.check()
    except EngineDied:
        return True
    return False


CHECKS = (stop_aborts_what_runs, stop_is_fine_twice_and_before_the_start)
