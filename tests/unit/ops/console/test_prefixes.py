"""The prefix tree of the console: how much its runs are used, who holds only a part, and how a block got to where it is."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from headwater.events.ports import Record
from headwater.ops.console.app import ConsoleApp
from headwater.ops.sim.fleet import SimFleet
from headwater.ops.sim.loop import VirtualLoop
from headwater.router.index.prefix_index import PrefixIndex
from headwater.router.state import RouterState
from headwater.schemas.events import BlocksStored
from headwater.schemas.hashing import unpack_hashes
from headwater.schemas.routing import Decision
from tests.sim.disaggregated import ask, fleet_of
from tests.support.worlds.told import records_of, told
from tests.support.worlds.virtual import virtual
from tests.unit.ops.console.test_app import call, open_app

HOUR = "window_s=3600"


async def view(app: ConsoleApp, target: str) -> Any:
    """A view's document."""
    answer = await call(app, f"/api/{target}")
    assert answer.status == 200, answer.body
    return answer.document


def chain(index: PrefixIndex, block: int) -> list[int]:
    """The blocks from the start of a prompt to one."""
    path = index.path(block, 1 << 16)
    return [] if path is None else path.tolist()


def used(records: Iterable[Record], at: int) -> list[Decision]:
    """The decisions up to a position that found a block of their prompt cached."""
    return [
        event
        for record in records
        if record.position <= at
        for event in record.batch.events
        if isinstance(event, Decision) and event.deepest and event.leg != "decode"
    ]


@virtual
async def test_runs_have_their_uses_and_those_who_hold_a_part(clock: VirtualLoop) -> None:
    """As counted decision by decision, and worker by worker, at several positions; uses before the window do not count."""
    async with told(clock) as fleet:
        app, records = open_app(fleet), await records_of(fleet)
        await view(app, f"tree?{HOUR}")
        state, partial = RouterState(), 0
        for record in records:
            state.apply(record)
            if record.position % 97 and record is not records[-1]:
                continue
            shown = await view(app, f"tree?{HOUR}&at={record.position}&limit=5000")
            found = used(records, record.position)
            chains = {one.deepest: chain(state.index, one.deepest) for one in found}
            for one in shown["runs"]:
                first = int(one["first"], 16)
                through = [decision for decision in found if first in chains[decision.deepest]]
                assert one["uses"] == len(through)
                assert one["used_ms"] == (
                    max(decision.wall_ns for decision in through) / 1e6 if through else None
                )
                holders = {held["worker"] for held in one["holders"]}
                depths = held_depths(state.index, chain(state.index, first))
                wanted = {name: depth for name, depth in depths.items() if depth and name not in holders}
                assert {held["worker"]: held["depth"] for held in one["partial"]} == wanted
                partial += len(wanted)
        assert partial, "no worker held only a part"
        assert shown["uses"] == len(found) > 10
        assert sum(one["uses"] for one in shown["runs"]) > 10
        last = await view(app, f"tree?window_s=3&at={records[-1].position}")
        assert 0 < last["uses"] < shown["uses"]


def held_depths(index: PrefixIndex, path: list[int]) -> dict[str, int]:
    """How many blocks from the start of a path each worker holds, on any tier."""
    _, depths = index.find(np.array(path, np.uint64))
    return {name: int(depths[1, slot]) for name, slot in index.slots.items()}


@virtual
async def test_a_block_is_traced_to_the_request_that_brought_it(clock: VirtualLoop) -> None:
    """A shared beginning to the first that had it, the rest of a prompt and an answer to their own; at an earlier position, to an earlier one."""
    async with fleet_of(clock, roles=("both",)) as fleet:
        shared = list(range(10, 58))
        first, second = [
            (await ask(fleet, [*shared, *range(start, start + 32)], 40))["id"] for start in (100, 200)
        ]
        app = open_app(fleet)
        await view(app, "tree?")
        shown = await view(app, "tree?")
        by_level = {level: [run for run in shown["runs"] if run["level"] == level] for level in (0, 1)}
        [root], tails = by_level[0], by_level[1]
        assert (root["blocks"], len(tails)) == (3, 2)
        worker = root["holders"][0]["worker"]
        for run_of_blocks in (root, *tails):
            found = await view(app, f"origin?worker={worker}&block={run_of_blocks['first']}")
            await check_event(fleet, found)
            assert found["cause"]["part"] == "prompt"
        causes = [
            (await view(app, f"origin?worker={worker}&block={block}"))["cause"]
            for block in (root["first"], *(tail["first"] for tail in tails))
        ]
        assert causes[0]["request"] == first
        assert {one["request"] for one in causes[1:]} == {first, second}
        answers = [
            (await view(app, f"origin?worker={worker}&block={tail['last']}"))["cause"] for tail in tails
        ]
        assert {(one["request"], one["part"]) for one in answers} == {(first, "answer"), (second, "answer")}
        before = found["stored"]["position"] - 1
        early = await view(app, f"origin?worker={worker}&block={found['block']}&at={before}")
        assert (early["stored"], early["cause"]) == (None, None)


async def check_event(fleet: SimFleet, found: Any) -> None:
    """The event at the position is the worker's, and stores the block."""
    [record] = [one for one in await records_of(fleet) if one.position == found["stored"]["position"]]
    stored = [event for event in record.batch.events if isinstance(event, BlocksStored)]
    assert record.batch.writer == found["worker"]
    assert any(int(found["block"], 16) in unpack_hashes(event.hashes) for event in stored)
    assert found["cause"]["position"] < record.position


@virtual
async def test_every_block_of_a_fleet_is_traced_to_a_request_that_its_worker_ran(clock: VirtualLoop) -> None:
    """Also after a worker was lost and filled again, and where prompts were computed apart."""
    for roles in (("both", "both", "both"), ("prefill", "prefill", "decode", "decode")):
        async with told(clock, roles) as fleet:
            app = open_app(fleet)
            await view(app, "tree?")
            shown = await view(app, "tree?limit=5000")
            requests = (await view(app, f"requests?{HOUR}&limit=1000"))["requests"]
            ran = {one["id"]: one["workers"] for one in requests}
            traced = 0
            for run_of_blocks in shown["runs"][::5]:
                for holder in run_of_blocks["holders"]:
                    name = holder["worker"]
                    found = await view(app, f"origin?worker={name}&block={run_of_blocks['first']}")
                    assert found["stored"]["tier"] == holder["tier"]
                    if found["cause"] is not None:
                        assert name in ran[found["cause"]["request"]]
                        traced += 1
            assert traced > 10
