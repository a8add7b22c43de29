"""KV that a simulated engine keeps for another one: freed when it was fetched, in one process or in two."""

import asyncio

import pytest

from headwater.engines.engine import Step, Transfer
from headwater.engines.sim import ZERO
from headwater.engines.sim.engine import SimEngine, SimSettings
from headwater.engines.sim.handoff import SimFabric, SimHandoff
from headwater.schemas.clock import SystemClock
from headwater.schemas.hashing import pack_tokens
from headwater.schemas.inference import GenerateRequest, Leg, Sampling


def leg(kind: Leg) -> GenerateRequest:
    """A leg of one prompt."""
    return GenerateRequest(
        f"r-{kind}", "e1", 1, pack_tokens(list(range(64))), Sampling(2, ignore_eos=True), leg=kind
    )


async def last_step(
    engine: SimEngine, request: GenerateRequest, transfer: Transfer | None = None
) -> list[Step]:
    """All steps of a request."""
    steps: list[Step] = []
    done = asyncio.Event()

    def emit(step: Step) -> None:
        steps.append(step)
        if step.finish:
            done.set()

    engine.submit(request, emit, transfer)
    await done.wait()
    return steps


@pytest.mark.parametrize("together", [True, False])
def test_fetched_kv_is_freed_at_once(together: bool) -> None:
    """Engines of one process see the fetch; one whose reader is elsewhere says so, and is told by its worker."""

    async def run() -> None:
        clock = SystemClock()
        fabric = SimFabric() if together else None
        prefill, decode = (
            SimEngine(SimSettings(step_time=ZERO), clock, SimHandoff(name, clock, fabric))
            for name in ("prefill", "decode")
        )
        for engine in (prefill, decode):
            await engine.start()
        try:
            steps = await last_step(prefill, leg("prefill"))
            [pinned] = [step.pinned for step in steps if step.pinned is not None]
            held = prefill.load().used_blocks
            assert held >= 64 // SimSettings().block_size
            await last_step(decode, leg("decode"), Transfer(pinned.params, pinned.first_tokens))
            assert prefill.notices_fetches == together
            if not together:
                assert prefill.load().used_blocks == held
                await prefill.release("r-prefill", pinned.params)
            assert prefill.load().used_blocks == 0
        finally:
            for engine in (prefill, decode):
                await engine.stop()

    asyncio.run(run())
