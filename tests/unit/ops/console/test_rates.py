"""Rates, usage and what waits, by tenant, model and priority: they sum to the whole, and who may not see tenants learns nothing of them."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from headwater.events.ports import Record
from headwater.ops.console.app import TENANT_VIEWS, VIEWS
from headwater.ops.history import series
from headwater.ops.history.requests import RequestTable
from headwater.ops.sim import fleet as sim_fleet
from headwater.ops.sim.fleet import SETTINGS, SimFleet
from headwater.ops.sim.loop import VirtualLoop
from headwater.router.queue import BusyLimits, QueueLimits, QueueSettings
from headwater.schemas.encoding import SCHEMA_VERSION, Batch
from headwater.schemas.events import RequestAccepted, RequestEnded
from headwater.schemas.hashing import tenant_digest
from tests.sim.disaggregated import EDGE, answer, fleet_of
from tests.support.worlds.clock import WALL_NS
from tests.support.worlds.virtual import virtual
from tests.unit.ops.console.test_app import Reader, call, open_app

TENANTS = ("red", "blue", "")
SECOND = 1_000_000_000


async def ask_for(fleet: SimFleet, tenant: str, prompt: Sequence[int], max_tokens: int, priority: int) -> Any:
    """A request of a tenant; returns the answer."""
    body = {
        "model": "sim",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "priority": priority,
    }
    headers = [(b"x-headwater-tenant", tenant.encode())] if tenant else []
    return await answer(fleet.servers[EDGE].connect("/v1/completions", msgspec.json.encode(body), headers))


async def asked(fleet: SimFleet) -> dict[str, Counter[str]]:
    """Requests of all tenants, most of the first one, and the sums of what their clients were told."""
    told: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for number in range(12):
        tenant = TENANTS[number % 3 if number % 2 else 0]
        prompt = [*range(40), number]
        used = (await ask_for(fleet, tenant, prompt, 3 + number, number % 2))["usage"]
        told[named(tenant)] += Counter(
            accepted=1,
            prompt_tokens=used["prompt_tokens"],
            completion_tokens=used["completion_tokens"],
            cached_tokens=used["prompt_tokens_details"]["cached_tokens"],
        )
    # What ended after the newest message of the pool's log is shown with the next one.
    await asyncio.sleep(3)
    return dict(told)


def named(tenant: str) -> str:
    """A tenant as the page names it."""
    return f"{tenant_digest(tenant):016x}" if tenant else ""


@virtual
async def test_usage_and_rates_by_tenant_sum_to_the_whole(clock: VirtualLoop) -> None:
    """Usage is what clients were told; the groups of a split are what the filter shows of them, and sum to all."""
    async with fleet_of(clock, roles=("both", "both")) as fleet:
        app, told = open_app(fleet), await asked(fleet)
        await call(app, "/api/fleet")
        used = (await call(app, "/api/usage?window_s=600")).document
        assert {row["tenant"] for row in used["by_tenant"]} == {named(one) for one in TENANTS}
        for row in used["by_tenant"]:
            wanted = told[row["tenant"]]
            assert {name: row[name] for name in wanted} == dict(wanted)
            assert (row["ended"], row["failed"], row["open"]) == (row["accepted"], 0, 0)
        assert [row["model"] for row in used["by_model"]] == ["sim"]
        assert {name: used["by_model"][0][name] for name in used["total"]} == used["total"]
        whole = (await call(app, "/api/series?window_s=600&columns=10&split=tenant")).document
        assert [group["tenant"] for group in whole["groups"]] == sorted(named(one) for one in TENANTS)
        for name in ("requests_per_s", "tokens_per_s"):
            sums = [
                sum(column) for column in zip(*(one["series"][name] for one in whole["groups"]), strict=True)
            ]
            assert sums == pytest.approx(whole["series"][name])
        for group in whole["groups"]:
            target = f"/api/series?window_s=600&columns=10&tenant={group['tenant'] or 'none'}&model=sim"
            alone = (await call(app, target)).document
            assert alone["series"] == group["series"]
            assert "running" not in alone["series"]
            listed = (
                await call(app, f"/api/requests?window_s=600&tenant={group['tenant'] or 'none'}")
            ).document
            assert listed["total"] == told[group["tenant"]]["accepted"]
        by_model = (await call(app, "/api/series?window_s=600&columns=10&split=model")).document
        [only] = by_model["groups"]
        assert (only["model"], only["requests"]) == ("sim", 12)
        assert only["series"].items() <= by_model["series"].items()


@virtual
async def test_without_the_scope_nothing_tells_tenants_apart(clock: VirtualLoop) -> None:
    """No view names one, lists or counts them, or can be asked for one."""
    async with fleet_of(clock, roles=("both", "both")) as fleet:
        await asked(fleet)
        app = open_app(fleet, Reader)
        await call(app, "/api/fleet")
        for target in ("series?split=tenant", "series?tenant=none", "requests?tenant=none", "usage?tenant=x"):
            refused = await call(app, f"/api/{target}")
            assert (refused.status, refused.document["error"]["code"]) == (403, "insufficient_scope")
        used = (await call(app, "/api/usage")).document
        assert (used["by_tenant"], used["total"]["accepted"]) == ([], 12)
        assert (await call(app, "/api/series")).document["tenants"] == []
        requests = (await call(app, "/api/requests")).document["requests"]
        decision = (await call(app, f"/api/request?id={requests[0]['id']}")).document["decisions"][0]["id"]
        digests = [tenant_digest(one) for one in TENANTS if one]
        secrets = [form for digest in digests for form in (f"{digest:x}", str(digest))]
        names = [*VIEWS, *TENANT_VIEWS, "events"]
        targets = [f"{name}?limit=1000&window_s=600&id={decision}&time_ms=1e12" for name in names]
        targets += [f"request?id={row['id']}" for row in requests]
        answered = 0
        for target in targets:
            shown = await call(app, f"/api/{target}")
            answered += shown.status == 200
            assert not [one for one in secrets if one.encode() in shown.body], target
        assert answered > len(requests) + len(names) - 3


def test_usage_counts_failures_and_what_is_open() -> None:
    """Tokens are those of requests that ended in the window, whenever they were accepted."""
    table = RequestTable()

    def tell(second: int, event: RequestAccepted | RequestEnded) -> None:
        now_ns = WALL_NS + second * SECOND
        batch: Batch[Any] = Batch(SCHEMA_VERSION, "e", 1, 1, now_ns, (event,))
        table.fold(Record(second, "hw.ns.req.e", now_ns, batch))

    for second, name in enumerate(("a", "b", "c", "d")):
        tell(second, RequestAccepted(name, "m", "chat", 100, 9, True, tenant=second % 2 + 1))
    tell(20, RequestEnded("a", "stop", 7, 64, 0, 10.0, 900.0))
    tell(21, RequestEnded("b", "error", 2, 0, 0, 10.0, 900.0, "lost"))
    tell(40, RequestEnded("c", "stop", 5, 32, 0, 10.0, 900.0))
    rows = series.selection(table, WALL_NS + 1 * SECOND, WALL_NS + 30 * SECOND)
    opened = table.open_at(WALL_NS + 30 * SECOND)
    assert series.usage(rows, len(opened)) == series.Usage(2, 2, 1, 200, 64, 9, 2)
    by_tenant = series.usage_by(rows, "tenant", [row.tenant for row in opened])
    assert by_tenant == {1: series.Usage(1, 1, 0, 100, 64, 7, 1), 2: series.Usage(1, 1, 1, 100, 0, 2, 1)}
    assert series.usage(rows.only("tenant", 2), 1) == by_tenant[2]


SMALL = SETTINGS._replace(sequences_max=2)
"""A worker that runs two requests at once."""


@virtual
async def test_what_waits_is_grouped_and_says_why(
    clock: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the only worker is full; once all are served, none waits, and the position before is shown as it was."""
    limits = QueueLimits(requests=100, tenant_share=1.0, wait_s=100.0)
    monkeypatch.setattr(sim_fleet, "queue_of", lambda seed: QueueSettings(BusyLimits(0, waiting=1), limits))
    async with fleet_of(clock, roles=("both",), settings=SMALL) as fleet:
        app, reader = open_app(fleet), open_app(fleet, Reader)
        await call(app, "/api/queue")
        kinds = [("red", 5), ("blue", 0), ("red", 0)]
        # Once a worker reports that requests wait in its engine, the others wait at the router.
        asked = [
            asyncio.ensure_future(
                ask_for(fleet, kinds[number % 3][0], [number] * 20, 60, kinds[number % 3][1])
            )
            for number in range(6)
        ]
        await asyncio.sleep(0.3)
        asked += [
            asyncio.ensure_future(
                ask_for(fleet, kinds[number % 3][0], [number] * 20, 60, kinds[number % 3][1])
            )
            for number in range(6, 18)
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
        asked = asyncio.ensure_future(ask_for(fleet, "red", [3] * 20, 60, 0))
        await asyncio.sleep(0.1)
        [worker] = fleet.engines
        await fleet.kill(worker)
        await asyncio.sleep(6)
        [one] = (await call(app, "/api/queue")).document["waiting"]
        asked.cancel()
        assert one["reason"] == f"it goes on elsewhere after {worker} failed; no worker takes requests"
