"""Simulated engines in processes of their own: the KV of a prompt that was handed over leaves its prefill worker."""

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from headwater.engines.sim.handoff import SimHandoff
from headwater.ops.sim import fleet
from headwater.ops.sim.fleet import SimFleet
from headwater.ops.sim.loop import VirtualLoop
from headwater.schemas.inference import Choreography
from tests.sim.disaggregated import ask, begin, fleet_of
from tests.support.worlds.virtual import virtual

PROMPT_TOKENS = 800
"""Half of a worker's blocks."""

PREFILL = "prefill-0"
FREED_S = 2.0
"""Far below the lease."""


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory is shared between the engines of the fleet, as between processes; every prompt is handed over."""
    monkeypatch.setattr(fleet, "WEIGHTS", msgspec.structs.replace(fleet.WEIGHTS, apart=True))
    monkeypatch.setattr(
        fleet, "SimHandoff", lambda name, process, _, how: SimHandoff(name, process, None, how)
    )


async def within(seconds: float, holds: Callable[[], object]) -> bool:
    """Does it come to hold in so many virtual seconds?"""
    clock = asyncio.get_running_loop()
    until = clock.time() + seconds
    while not holds() and clock.time() < until:
        await asyncio.sleep(0.01)
    return bool(holds())


def used(up: SimFleet) -> int:
    """Blocks of the prefill worker that are in use."""
    return up.sim_engines[PREFILL].load().used_blocks


def prompt(number: int) -> list[int]:
    """One that shares nothing with others."""
    return [number + 1] * PROMPT_TOKENS


@pytest.mark.parametrize("how", ["returned", "room", "opaque"])
@virtual
async def test_what_was_fetched_is_freed_at_once(clock: VirtualLoop, how: Choreography) -> None:
    """Not with its lease, though no engine tells the other."""
    async with fleet_of(clock, how) as up:
        document = await ask(up, prompt(1), 20)
        assert document["usage"]["completion_tokens"] == 20
        assert await within(FREED_S, lambda: not used(up))


@pytest.mark.parametrize("how", ["returned", "room", "opaque"])
@virtual
async def test_a_client_that_leaves_while_its_kv_is_fetched_leaves_none_behind(
    clock: VirtualLoop, how: Choreography
) -> None:
    """Also when it leaves at any moment of the hand-off."""
    async with fleet_of(clock, how) as up:
        for number in range(8):
            connection = begin(up, prompt(number), 200)
            await within(FREED_S, lambda: used(up))
            await asyncio.sleep(0.02 * number)
            connection.hang_up()
            assert await within(FREED_S, lambda: not used(up))
