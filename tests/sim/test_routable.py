"""What an edge says of itself is true: a model is listed, and /health is 200, exactly while a request would be served."""

import asyncio
from collections.abc import Sequence

import pytest

from headwater.actors.runtime.lease import TTL_S
from headwater.engines.engine import EngineInfo
from headwater.engines.sim import StepTime
from headwater.engines.sim.engine import SimEngine
from headwater.ops.sim import fleet
from headwater.ops.sim.fleet import SETTINGS, SimFleet
from headwater.ops.sim.loop import VirtualLoop
from headwater.schemas.events import Role
from tests.sim.disaggregated import SPLIT, ask, fleet_of, get
from tests.support.worlds.virtual import virtual

HALF_AN_HOUR_S = 1_800.0
SOON_S = 0.5
"""A change of a worker's state is known within this."""


async def shown(up: SimFleet) -> tuple[int, str, list[str]]:
    """Status and word of /health, and the models listed."""
    (status, health), (_, models) = await get(up, "/health"), await get(up, "/v1/models")
    return status, health["status"], [model["id"] for model in models["data"]]


OK = (200, "ok", ["sim"])
NOBODY: tuple[int, str, list[str]] = (503, "no workers", [])


@virtual
async def test_a_worker_that_takes_no_requests_serves_no_model(clock: VirtualLoop) -> None:
    """Paused, draining, asleep, gone: not listed within half a second, killed: once its lease has lapsed."""
    async with fleet_of(clock, roles=("both",)) as up:
        status = up.worker("both-0").status
        for state in ("paused", "draining", "sleeping"):
            assert await shown(up) == OK
            assert (await ask(up, [1] * 20))["object"] == "text_completion"
            status.set_state(state)
            await asyncio.sleep(SOON_S)
            assert await shown(up) == NOBODY
            status.set_state("ready")
            await asyncio.sleep(SOON_S)
        await up.kill("both-0")
        await asyncio.sleep(TTL_S + 2.0)
        assert await shown(up) == NOBODY
        up.start("both-0")
        await asyncio.sleep(2.0)
        assert await shown(up) == OK


@virtual
async def test_without_a_router_nothing_is_routable(clock: VirtualLoop) -> None:
    """Workers alone serve nobody."""
    async with fleet_of(clock, roles=("both",)) as up:
        await up.kill("router-0")
        await asyncio.sleep(TTL_S + 2.0)
        assert await shown(up) == (503, "not routable", [])
        up.start("router-0")
        await asyncio.sleep(2.0)
        assert await shown(up) == OK
        assert (await ask(up, [1] * 20))["object"] == "text_completion"


@pytest.mark.parametrize("roles", [SPLIT[:1], SPLIT[1:], SPLIT])
@virtual
async def test_engines_that_serve_legs_only_serve_as_a_pair(
    clock: VirtualLoop, roles: Sequence[Role]
) -> None:
    """One half of it serves nobody, and is not listed."""
    async with fleet_of(clock, "room", roles) as up:
        if len(roles) == 2:
            assert await shown(up) == OK
            assert (await ask(up, [1] * 20))["object"] == "text_completion"
        else:
            assert await shown(up) == (503, "not routable", [])


@virtual
async def test_an_engine_may_take_half_an_hour_to_start(
    clock: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody gives it up; nothing is listed until it serves, and then the first request is served."""

    class Slow(SimEngine):
        async def start(self) -> EngineInfo:
            await self._clock.sleep(HALF_AN_HOUR_S)
            return await super().start()

    monkeypatch.setattr(fleet, "SimEngine", Slow)
    async with fleet_of(clock, roles=("both",)) as up:
        began = clock.time()
        while clock.time() < began + HALF_AN_HOUR_S - 60.0:
            assert await shown(up) == NOBODY
            await asyncio.sleep(100.0)
        while await shown(up) == NOBODY:
            await asyncio.sleep(1.0)
        assert clock.time() - began < HALF_AN_HOUR_S + 10.0
        assert await shown(up) == OK
        assert (await ask(up, [1] * 20))["object"] == "text_completion"
        assert up.processes["both-0"].alive


@virtual
async def test_a_request_may_take_half_an_hour(clock: VirtualLoop) -> None:
    """It is neither cut off nor forgotten: its worker counts it to the end, and the router with it."""
    tokens = 180
    slow = StepTime((0.0, 0.0, 1_000 * HALF_AN_HOUR_S / tokens), (0.0, 0.0, 1_000 * HALF_AN_HOUR_S / tokens))
    settings = SETTINGS._replace(step_time=slow)
    async with fleet_of(clock, roles=("both",), settings=settings) as up:
        while await shown(up) != OK:
            await asyncio.sleep(1.0)
        began = clock.time()
        asked = asyncio.ensure_future(ask(up, [1] * 20, tokens))
        while clock.time() < began + HALF_AN_HOUR_S - 60.0:
            await asyncio.sleep(300.0)
            assert len(up.router("router-0").state.loads.workers["both-0"].requests) == 1
        answer = await asked
        assert clock.time() - began > HALF_AN_HOUR_S - 60.0
        assert answer["usage"]["completion_tokens"] == tokens
        await asyncio.sleep(2.0)
        assert up.router("router-0").state.loads.workers["both-0"].requests == {}
