"""Roll-outs on a simulated fleet of production actors: promoted, held, rolled back, interrupted and continued, while clients ask."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from headwater.actors.runtime.ports import Ports
from headwater.engines.sim import StepTime
from headwater.ops.operator import rollout
from headwater.ops.operator.rollout import Canned, Switch, shadow_record
from headwater.ops.operator.rollout_gates import DEFAULT_GATES
from headwater.ops.sim.checks import messages
from headwater.ops.sim.fleet import POOL, SETTINGS, SimFleet
from headwater.ops.sim.loop import VirtualLoop
from headwater.ops.sim.network import Process
from headwater.router.replay import Recorded, Replay
from headwater.router.state import RouterState
from headwater.schemas.control import SplitReply
from headwater.schemas.events import Role, SplitSubject, TrafficSplit
from headwater.schemas.routing import Decision
from tests.sim.disaggregated import ask, fleet_of
from tests.support.worlds.virtual import events_of, virtual

SLOW = SETTINGS._replace(step_time=StepTime((0.0, 0.0, 60.0), (0.0, 0.0, 60.0)))
OLD_AND_NEW = ("old", "old", "new")
TOKENS = 4


class World:
    """A fleet under load, and operators' switches on it."""

    def __init__(self, clock: VirtualLoop, fleet: SimFleet) -> None:
        self.fleet = fleet
        self.clock = clock
        self.said: list[str] = []
        self.failed: list[Any] = []
        self.answered = 0
        self._operators = 0

    def operator(self, subject: SplitSubject = "revision") -> Switch:
        """A switch of a process of its own."""
        return Switch(self.ports(), POOL, subject, "me", Canned(), self.said.append)

    def ports(self) -> Ports:
        """The ports of a new process."""
        self._operators += 1
        name = f"operator-{self._operators}"
        process = self.fleet.processes[name] = Process(name, self.clock)
        return self.fleet.ports(process, name)

    async def begin(self, switch: Switch, asked: rollout.Asked) -> SplitReply:
        """The first step."""
        return await switch.set(rollout.begin(asked, await switch.present(), "id"))

    async def load(self, seed: int) -> None:
        """One client after the other, each with a prompt of its own. Does not return."""
        number = 0
        while True:
            number += 1
            prompt = [seed, number % 250, number // 250 % 250] * 13
            found = await ask(self.fleet, prompt, TOKENS)
            self.answered += 1
            if "choices" not in found:
                self.failed.append(found)
            await asyncio.sleep(0.2)

    async def splits(self) -> list[TrafficSplit]:
        """Those in the log."""
        found: list[TrafficSplit] = events_of(await self._records(), TrafficSplit)
        return found

    async def decisions(self) -> list[Decision]:
        """Those in the log."""
        found: list[Decision] = events_of(await self._records(), Decision)
        return found

    async def _records(self) -> list[Any]:
        return list(await messages(self.fleet.store.pool(POOL)))

    async def verify(self) -> int:
        """Recompute every decision of the log; returns how many there are."""
        records = await self._records()
        decisions = [
            Recorded((one.batch.writer, one.batch.epoch), event, one.stored_ns)
            for one in records
            for event in one.batch.events
            if isinstance(event, Decision)
        ]
        replay = Replay(RouterState(), decisions)
        assert replay.start() is None
        assert [found for one in records if (found := replay.step(one)) is not None] == []
        assert replay.verified == len(decisions)
        return len(decisions)


def asked(to: str = "new", **fields: Any) -> rollout.Asked:
    """In two steps, the first of 10 seconds at least."""
    wanted = rollout.Asked("revision", to, (20.0, 100.0), 10.0, DEFAULT_GATES, 30, "me")
    return wanted._replace(**fields)


@contextlib.asynccontextmanager
async def world(
    clock: VirtualLoop, revisions: Sequence[str] = OLD_AND_NEW, *, slow: str = "", clients: int = 6
) -> AsyncIterator[World]:
    """A fleet of workers of these revisions, with clients. No request may fail."""
    own = {slow: SLOW} if slow else {}
    roles: list[Role] = ["both"] * len(revisions)
    async with fleet_of(clock, roles=roles, revisions=revisions, own_settings=own) as up:
        made = World(clock, up)
        tasks = [asyncio.create_task(made.load(number)) for number in range(clients)]
        try:
            yield made
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for name in [name for name in up.processes if name.startswith("operator")]:
                await up.kill(name)
        assert made.failed == []


@virtual
async def test_a_good_revision_is_promoted_and_every_decision_is_recomputed(clock: VirtualLoop) -> None:
    """Each step has its share and is held; the log says why it ended."""
    async with world(clock) as up:
        switch = up.operator()
        began = clock.time()
        assert await switch.run(await up.begin(switch, asked())) == 0
        assert clock.time() - began >= 10.0
        first, last = await up.splits()
        assert (first.shares, last.shares) == ({"old": 80.0, "new": 20.0}, {"new": 100.0})
        assert last.reason.startswith("20 % held for ")
        canary = Counter(one.revision for one in await up.decisions() if one.revision_draw is not None)
        assert 0.14 < canary["new"] / canary.total() < 0.26
        count = len(await up.decisions())
        await asyncio.sleep(5.0)
        assert {one.revision for one in (await up.decisions())[count + 6 :]} == {"new"}
        assert await up.verify() > 100


@virtual
async def test_a_slow_revision_is_rolled_back_by_its_gate(clock: VirtualLoop) -> None:
    """Before the step has been held; the reason names the gate and both sides, and it gets nothing afterwards."""
    async with world(clock, slow="both-2") as up:
        switch = up.operator()
        began = clock.time()
        assert await switch.run(await up.begin(switch, asked())) == 1
        assert clock.time() - began < 30.0
        *_, last = await up.splits()
        assert last.shares == {"old": 2.0, "new": 0.0}
        assert last.reason.startswith("gate failed: ")
        assert "_p90: " in last.reason
        assert "limit 1.5 times" in last.reason
        await asyncio.sleep(1.0)
        count = len(await up.decisions())
        await asyncio.sleep(5.0)
        assert {one.revision for one in (await up.decisions())[count:]} == {"old"}


@virtual
async def test_a_revision_that_crashes_is_rolled_back_though_no_client_noticed(clock: VirtualLoop) -> None:
    """Its requests were finished elsewhere: what counts is where they failed."""
    async with world(clock) as up:
        switch = up.operator()
        run = asyncio.create_task(switch.run(await up.begin(switch, asked(steps=(50.0, 100.0)))))
        while not run.done():
            await asyncio.sleep(3.0)
            await up.fleet.kill("both-2")
            up.fleet.start("both-2")
        assert await run == 1
        *_, last = await up.splits()
        assert last.reason.startswith("gate failed: errors: ")
        assert last.shares == {"old": 2.0, "new": 0.0}


@virtual
async def test_without_traffic_a_step_is_held_and_says_so(clock: VirtualLoop) -> None:
    """Two minutes without a request are no evidence."""
    async with world(clock, clients=0) as up:
        switch = up.operator()
        run = asyncio.create_task(switch.run(await up.begin(switch, asked())))
        await asyncio.sleep(130.0)
        assert not run.done()
        assert "holds, undecided: errors, ttft_p90, itl_p90" in up.said[-1]
        assert "too few to judge by: new side 0 of 30 requests, old side 0 of 30 requests" in up.said[-1]
        assert len(await up.splits()) == 1
        tasks = [asyncio.create_task(up.load(number)) for number in range(6)]
        assert await asyncio.wait_for(run, 600.0) == 0
        for task in tasks:
            task.cancel()


@virtual
async def test_an_interrupted_switch_is_continued_by_another_process(clock: VirtualLoop) -> None:
    """The plan, the time of the step and what it was judged by are in the logs."""
    async with world(clock) as up:
        first = up.operator()
        run = asyncio.create_task(first.run(await up.begin(first, asked())))
        began = clock.time()
        await asyncio.sleep(7.0)
        run.cancel()
        second = up.operator()
        assert await second.run(await second.present()) == 0
        assert 10.0 <= clock.time() - began < 30.0
        assert len(await up.splits()) == 2


@pytest.mark.soak
@virtual
async def test_of_two_switches_each_step_is_taken_once(clock: VirtualLoop) -> None:
    """Both run to the end, and the log has every step once; a rollback by a third ends both."""
    async with world(clock) as up:
        first, second = up.operator(), up.operator()
        present = await up.begin(first, asked(steps=(20.0, 50.0, 100.0), hold_s=5.0))
        assert list(await asyncio.gather(first.run(present), second.run(present))) == [0, 0]
        shares = [one.shares["new"] for one in await up.splits()]
        assert shares == [20.0, 50.0, 100.0]
        third = up.operator()
        back = await third.set(rollout.roll_back(await third.present(), "me", "by hand"))
        assert back.split is not None
        assert back.split.shares == {"old": 2.0, "new": 0.0}


@virtual
async def test_a_restarted_router_and_a_new_one_have_the_split(clock: VirtualLoop) -> None:
    """From its snapshot or from the log: the roll-out goes on meanwhile."""
    async with world(clock) as up:
        switch = up.operator()
        run = asyncio.create_task(switch.run(await up.begin(switch, asked())))
        await asyncio.sleep(3.0)
        await up.fleet.kill("router-0")
        up.fleet.start("router-0")
        assert await run == 0
        shares = up.fleet.router("router-0").state.loads.shares("revision")
        assert shares == {"new": 100.0}
        assert len(await up.splits()) == 2


@pytest.mark.soak
@virtual
async def test_the_old_workers_may_leave_after_the_last_step_and_the_new_ones_before(
    clock: VirtualLoop,
) -> None:
    """Neither takes the pool down: its share goes to what is there."""
    async with world(clock) as up:
        switch = up.operator()
        await up.begin(switch, asked(steps=(50.0, 100.0)))
        up.fleet.worker("both-2").stop()
        await asyncio.sleep(8.0)
        count = up.answered
        await asyncio.sleep(2.0)
        assert up.answered > count
        up.fleet.start("both-2")
        await asyncio.sleep(5.0)
        await switch.set(rollout.promote(await switch.present(), "me", "by hand"))
        for name in ("both-0", "both-1"):
            up.fleet.worker(name).stop()
        await asyncio.sleep(8.0)
        count = up.answered
        await asyncio.sleep(2.0)
        assert up.answered > count


@virtual
async def test_a_policy_is_promoted_by_the_same_gates(clock: VirtualLoop) -> None:
    """And a shadow's record of it is said before."""
    async with world(clock, ("r", "r", "r")) as up:
        ports = up.ports()
        text = await shadow_record(await ports.pool_log(POOL), "least_loaded")
        assert text.startswith("no shadow has judged least_loaded in this log")
        switch = up.operator("policy")
        wanted = asked("least_loaded", subject="policy")
        assert await switch.run(await up.begin(switch, wanted)) == 0
        found = Counter(one.preferences.policy for one in await up.decisions() if one.policy_draw)
        assert set(found) == {"kv", "least_loaded"}
        assert await up.verify() > 100


@pytest.mark.parametrize("how", ["returned", pytest.param("room", marks=pytest.mark.soak)])
@virtual
async def test_prefill_and_decode_of_two_revisions_never_meet(clock: VirtualLoop, how: Any) -> None:
    """Two pairs of prefill and decode workers, with equal hand-offs: under load and a split each request stays within one revision."""
    roles: list[Role] = ["prefill", "decode", "prefill", "decode"]
    async with fleet_of(clock, how, roles, revisions=("old", "old", "new", "new")) as fleet:
        up = World(clock, fleet)
        switch = up.operator()
        await up.begin(switch, asked(steps=(50.0, 100.0)))
        answers = [await ask(fleet, [number] * 120, 4) for number in range(40)]
        assert all("choices" in one for one in answers), answers
        legs: dict[str, set[str]] = {}
        for one in await up.decisions():
            legs.setdefault(one.request.rsplit("-", 2)[0], set()).add(one.revision)
        assert {len(found) for found in legs.values()} == {1}
        assert set().union(*legs.values()) == {"old", "new"}
        assert sum(one.leg == "decode" for one in await up.decisions()) > 10
        await fleet.kill("operator-1")
