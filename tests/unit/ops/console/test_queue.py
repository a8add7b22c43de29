"""The view of what waits for a worker: by priority and tenant, with the reason, as the log has it at the position."""

import asyncio
from typing import Any

import msgspec
import pytest

from headwater.actors.http.asgi import Scope
from headwater.ops.console.app import READ, ConsoleAccess, ConsoleApp, Scopes
from headwater.ops.console.pools import Pools
from headwater.ops.sim import fleet as sim_fleet
from headwater.ops.sim.fleet import SETTINGS, SimFleet
from headwater.ops.sim.loop import VirtualLoop
from headwater.router.queue import BusyLimits, QueueLimits, QueueSettings
from headwater.schemas.hashing import tenant_digest
from tests.sim.disaggregated import EDGE, answer, fleet_of
from tests.support.worlds.told import ports_of
from tests.support.worlds.virtual import virtual
from tests.unit.ops.console.test_app import call, open_app

SMALL = SETTINGS._replace(sequences_max=2)
"""A worker that runs two requests at once."""


class _Reader(ConsoleAccess):
    async def admit(self, scope: Scope) -> Scopes:
        return READ


async def ask_for(fleet: SimFleet, tenant: str, priority: int, number: int) -> Any:
    body = {
        "model": "sim",
        "prompt": [number] * 20,
        "max_tokens": 60,
        "ignore_eos": True,
        "priority": priority,
    }
    headers = [(b"x-headwater-tenant", tenant.encode())]
    return await answer(fleet.servers[EDGE].connect("/v1/completions", msgspec.json.encode(body), headers))


def named(tenant: str) -> str:
    """A tenant as the page names it."""
    return f"{tenant_digest(tenant):016x}"


@virtual
async def test_what_waits_is_grouped_and_says_why(
    clock: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the only worker is full; once all are served, none waits, and the position before is shown as it was."""
    limits = QueueLimits(requests=100, tenant_share=1.0, wait_s=100.0)
    monkeypatch.setattr(sim_fleet, "queue_of", lambda seed: QueueSettings(BusyLimits(0, waiting=1), limits))
    async with fleet_of(clock, roles=("both",), settings=SMALL) as fleet:
        app = open_app(fleet)
        pools = Pools(ports_of(fleet), "the simulator")
        reader = ConsoleApp(pools, _Reader(None, None, is_open=True))
        clock.create_task(pools.run())
        await call(app, "/api/queue")
        kinds = [("red", 5), ("blue", 0), ("red", 0)]
        # Once a worker reports that requests wait in its engine, the others wait at the router.
        asked = [asyncio.ensure_future(ask_for(fleet, *kinds[number % 3], number)) for number in range(6)]
        await asyncio.sleep(0.3)
        asked += [
            asyncio.ensure_future(ask_for(fleet, *kinds[number % 3], number)) for number in range(6, 18)
        ]
        await asyncio.sleep(0.3)
        await call(reader, "/api/queue")
        view = (await call(app, "/api/queue")).document
        waiting = view["waiting"]
        assert len(waiting) == 12
        assert all(one["reason"].startswith("every worker has") for one in waiting)
        assert [one["priority"] for one in waiting] == sorted(one["priority"] for one in waiting)
        urgent = sum(one["priority"] == 0 for one in waiting)
        assert {(one["priority"], one["before"]) for one in waiting} == {(0, 0), (5, urgent)}
        groups = {(one["priority"], one["tenant"]): one for one in view["groups"]}
        assert set(groups) == {(0, named("blue")), (0, named("red")), (5, named("red"))}
        for (priority, tenant), group in groups.items():
            own = [one for one in waiting if (one["priority"], one["tenant"]) == (priority, tenant)]
            assert group["count"] == len(own)
            assert group["oldest_ms"] == max(one["waited_ms"] for one in own)
            assert group["count"] + group["routed"] == 6
        blind = (await call(reader, f"/api/queue?at={view['position']}")).document
        assert blind["by"] == "priority"
        assert [(one["priority"], one["tenant"], one["count"]) for one in blind["groups"]] == [
            (0, "", urgent),
            (5, "", len(waiting) - urgent),
        ]
        assert {one["tenant"] for one in blind["waiting"]} == {""}
        await asyncio.gather(*asked)
        await asyncio.sleep(3)
        done = (await call(app, "/api/queue")).document
        assert done["waiting"] == []
        by_group = {(one["priority"], one["tenant"]): one for one in done["groups"]}
        assert {group: one["routed"] for group, one in by_group.items()} == dict.fromkeys(groups, 6)
        assert all(one["p99_ms"] > 1_000 for one in by_group.values())
        assert (await call(app, f"/api/queue?at={view['position']}")).document == view


@virtual
async def test_a_request_that_lost_its_worker_says_so(clock: VirtualLoop) -> None:
    """It names the worker that failed, and that no other takes requests."""
    async with fleet_of(clock, roles=("both",)) as fleet:
        app = open_app(fleet)
        await call(app, "/api/queue")
        asked = asyncio.ensure_future(ask_for(fleet, "red", 0, 3))
        await asyncio.sleep(0.1)
        [worker] = fleet.engines
        await fleet.kill(worker)
        await asyncio.sleep(6)
        [one] = (await call(app, "/api/queue")).document["waiting"]
        asked.cancel()
        assert one["reason"] == f"it goes on elsewhere after {worker} failed; no worker takes requests"
