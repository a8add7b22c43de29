"""Requests before their first token, whichever way prefill and decode are split: what clients are told, and who waits."""

import asyncio

import pytest
from msgspec import structs

from headwater.engines.sim.scheduler import SimSettings
from headwater.ops.sim import fleet, loop
from headwater.ops.sim.fleet import BLOCK_SIZE, SETTINGS
from headwater.ops.sim.loop import VirtualLoop
from headwater.schemas.events import Role
from headwater.schemas.inference import Choreography
from tests.sim.disaggregated import SPLIT, ask, begin, cached_tokens, fleet_of
from tests.support.worlds.virtual import virtual

WAYS: list[tuple[Choreography, tuple[Role, ...]]] = [
    ("returned", ("both",)),
    ("returned", SPLIT),
    ("room", SPLIT),
    ("opaque", SPLIT),
]
LEAVING = 10
LONG = 1_500
CHUNK_S = SETTINGS.step_time.seconds(SETTINGS.step_tokens_max, 0.0, decoding=False)
"""The longest that one step computes prompts."""

SLACK_S = 0.1
"""Messages, and the steps that the last request itself takes."""


@pytest.mark.parametrize(("how", "roles"), WAYS)
@virtual
async def test_usage_states_exactly_what_was_cached(
    clock: VirtualLoop, monkeypatch: pytest.MonkeyPatch, how: Choreography, roles: tuple[Role, ...]
) -> None:
    """The blocks that the engine that prefills had; a transfer is no hit, and no hit is lost by one."""
    monkeypatch.setattr(fleet, "WEIGHTS", structs.replace(fleet.WEIGHTS, apart=True, local_tokens=0))
    first = list(range(100, 100 + 5 * BLOCK_SIZE + 3))
    prompts = (first, first, first[: 3 * BLOCK_SIZE] + [7] * 40, [8] * 64)
    async with fleet_of(clock, how, roles) as up:
        cached = [cached_tokens(await ask(up, prompt)) for prompt in prompts]
    assert cached == [0, 5 * BLOCK_SIZE, 3 * BLOCK_SIZE, 0]


@pytest.mark.parametrize(("how", "roles"), WAYS)
def test_clients_that_leave_before_their_first_token_delay_nobody(
    how: Choreography, roles: tuple[Role, ...]
) -> None:
    """After ten long prompts whose clients left, a short one waits for one step at most."""

    async def seconds(clock: VirtualLoop, leaving: int) -> float:
        async with fleet_of(clock, how, roles, roomy()) as up:
            left = [begin(up, [number] * LONG, 400, stream=True) for number in range(leaving)]
            # All of them are with an engine, and none has a token.
            await asyncio.sleep(0.1)
            assert [connection.status for connection in left if connection.status == 200] == []
            for connection in left:
                connection.hang_up()
            await asyncio.sleep(0.02)
            began = clock.time()
            await ask(up, [99] * 40, 1)
            took_s = clock.time() - began
            await asyncio.sleep(1.0)
            assert {engine.load()[:2] for engine in up.sim_engines.values()} == {(0, 0)}
            assert up.fabric.pins == {}
            return took_s

    alone_s = loop.run(lambda clock: seconds(clock, 0))
    behind_s = loop.run(lambda clock: seconds(clock, LEAVING))
    assert behind_s <= alone_s + CHUNK_S + SLACK_S
    assert LEAVING * LONG / SETTINGS.step_tokens_max * CHUNK_S > 5 * (CHUNK_S + SLACK_S), "it could show"


def roomy() -> SimSettings:
    """Room for all prompts at once: none waits for memory."""
    return SETTINGS._replace(total_blocks=2_048)
