"""The router actor on a virtual clock: one decision per query, what it does about holes, and what it says of its lag."""

import asyncio
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from headwater.actors.router.divergence import (
    PERIOD_S,
    RESYNC_PAUSE_S,
    RESYNC_PAUSE_S_MAX,
    ROUNDS,
    LeaseReconciler,
)
from headwater.actors.router.follower import LAG_S_MAX
from headwater.events.writer import Writer
from headwater.ops.sim.fleet import NAMESPACE, POOL
from headwater.router.state import RouterState
from headwater.schemas import subjects
from headwater.schemas.events import BlocksCleared, WorkerLeft
from headwater.schemas.routing import Decision, RouteQuery, RouteRefused
from headwater.schemas.tables import Lease
from tests.support.data.examples import joined, packed, record
from tests.support.data.story import fold
from tests.support.worlds.virtual import Stage, events_of, staged, until

QUERY = subjects.route_query(NAMESPACE, POOL)
_reply: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Decision | RouteRefused)


async def asked(stage: Stage, request: str) -> Decision:
    """What the router answers to a query."""
    if "edge" not in stage.fleet.processes:
        stage.edge = stage.world("edge")[1]  # type: ignore[attr-defined]
    query = msgspec.msgpack.encode(RouteQuery(request, 32, 16, packed(1, 2)))
    data = await stage.edge.bus.request(QUERY, query, timeout_s=5.0)  # type: ignore[attr-defined]
    reply = _reply.decode(data)
    assert isinstance(reply, Decision), reply
    return reply


class Asked:
    """Counts the resyncs that workers are asked for."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.at_s: list[float] = []

    async def listen(self, stage: Stage, *workers: str) -> None:
        """Hear what these workers are asked."""
        _, world = stage.world("listener")

        async def on_ask(message: Any) -> None:
            self.names.append(message.subject.split(".")[3])
            self.at_s.append(stage.clock.time())

        for worker in workers:
            await world.bus.subscribe(subjects.resync(NAMESPACE, worker), on_ask)


@staged
async def test_a_query_that_comes_twice_is_decided_once(stage: Stage) -> None:
    """The second gets the first one's answer; the load counts it once, the log has it once."""
    await stage.engine("w1")
    router = await stage.router("r1")
    first = await asked(stage, "a-0-1")
    assert await asked(stage, "a-0-1") == first
    other = await asked(stage, "b-0-1")
    assert (first.number, other.number) == (1, 2)
    await asyncio.sleep(1.0)
    decisions = events_of(await stage.records(), Decision)
    assert [made.request for made in decisions] == ["a-0-1", "b-0-1"]
    assert router.stats()["decisions"] == 2
    assert set(router.state.loads.workers["w1"].requests) == {"a-0-1", "b-0-1"}


@staged
async def test_a_gap_starts_from_nothing_and_asks_every_live_worker(stage: Stage) -> None:
    """What retention cut behind the router's back: it knows nobody until each has announced itself anew."""
    for name in ("w1", "w2"):
        await stage.engine(name)
    heard = Asked()
    await heard.listen(stage, "w1", "w2")
    last = (await stage.pool.bounds()).last
    stage.pool.purge(last + 1)
    router = await stage.router("r1")
    assert router.state.loads.workers == {}
    assert not router.state.chains.whole
    assert router.state.position >= last
    await until(lambda: set(router.state.loads.workers) == {"w1", "w2"}, 3.0)
    await until(lambda: router.stats()["cold"] == 0, 1.0)
    assert sorted(heard.names) == ["w1", "w2"]
    assert len(events_of(await stage.records(), BlocksCleared)) == 2
    assert (await asked(stage, "a-0-1")).worker in ("w1", "w2")
    await asyncio.sleep(2 * RESYNC_PAUSE_S_MAX)
    assert len(heard.names) == 2, "nobody is asked again without need"


@pytest.mark.parametrize("how", ["altered", "altered joining"])
@staged
async def test_a_broken_chain_makes_one_worker_cold_and_asks_it(stage: Stage, how: str) -> None:
    """The worker whose message is gone, and no other; it is cold until it has announced itself."""
    for name in ("w1", "w2"):
        await stage.engine(name)
    heard = Asked()
    await heard.listen(stage, "w1", "w2")
    kind: subjects.PoolKind = "fleet" if how == "altered joining" else "kv"
    wanted = subjects.pool_subject(NAMESPACE, POOL, kind, "w1")
    [position] = [one.position for one in await stage.records() if one.subject == wanted]
    stage.pool.alter(position, b"\0" + stage.pool.raw(position).data[1:])
    router = await stage.router("r1")
    if how == "altered joining":
        assert set(router.state.loads.workers) == {"w2"}
    else:
        assert router.state.cold == {"w1"}
        assert router.stats()["cold"] == 1
    await until(lambda: set(router.state.loads.workers) == {"w1", "w2"} and not router.state.cold, 5.0)
    await asyncio.sleep(1.0)
    assert set(heard.names) == {"w1"}
    assert router.state.cold == set()


@staged
async def test_decisions_are_degraded_when_own_ones_do_not_come_back(stage: Stage) -> None:
    """The log takes nothing: answers go on, and say so once the oldest has been out for `LAG_S_MAX`."""
    await stage.engine("w1")
    await stage.router("r1")
    assert not (await asked(stage, "before")).degraded
    await asyncio.sleep(1.0)
    stage.fleet.store.full = 1
    began = stage.clock.time()
    told: list[tuple[float, bool]] = []
    for number in range(30):
        made = await asked(stage, f"r{number}")
        told.append((stage.clock.time() - began, made.degraded))
        await asyncio.sleep(0.1)
    assert all(degraded == (at_s > LAG_S_MAX) for at_s, degraded in told if abs(at_s - LAG_S_MAX) > 0.1)
    assert {degraded for _, degraded in told} == {True, False}
    stage.fleet.store.full = 0
    await asyncio.sleep(3.0)
    assert not (await asked(stage, "after")).degraded


@staged
async def test_a_busy_router_is_not_degraded(stage: Stage) -> None:
    """With a query in every moment there is always a decision under way; each comes back in time."""
    await stage.engine("w1")
    router = await stage.router("r1")
    made: list[Decision] = []
    stage.fleet.processes["r1"].slow_reader_s = 0.1

    async def ask(number: int) -> None:
        made.append(await asked(stage, f"r{number}"))

    async with asyncio.TaskGroup() as group:
        for number in range(1_000):
            group.create_task(ask(number))
            await asyncio.sleep(0.001)
            assert number < 50 or not router.is_settled
    assert len(made) == 1_000
    assert not any(decision.degraded for decision in made)


@staged
async def test_the_lag_is_told_in_messages_and_seconds(stage: Stage) -> None:
    """A router that reads slowly tells how far behind it is, and of what age its newest message was."""
    await stage.engine("w1")
    router = await stage.router("r1")
    assert (router.stats()["lag_messages"], router.stats()["lag_s"]) == (0, 0.0)
    writer = Writer(
        stage.pool, subjects.pool_subject(NAMESPACE, POOL, "load", "x"), "x", 1, stage.world("x")[0]
    )
    stage.fleet.processes["r1"].slow_reader_s = 3.0
    await asyncio.sleep(3.5)
    for _ in range(600):
        await stage.pool.append(*await writer.first_entries())
    worst = 0
    lag_s = 0.0
    for _ in range(1_000):
        worst = max(worst, router.stats()["lag_messages"])
        lag_s = max(lag_s, router.stats()["lag_s"])
        await asyncio.sleep(0.01)
    assert worst >= 256
    assert 3.0 <= lag_s < 10.0
    stage.fleet.processes["r1"].slow_reader_s = 0.0
    await until(lambda: router.stats()["lag_messages"] == 0 and router.stats()["lag_s"] == 0.0)


@staged
async def test_a_replaced_log_is_noticed_while_it_is_read(stage: Stage) -> None:
    """Deleted and made anew: the fold begins at its start, and the workers announce themselves there."""
    await stage.engine("w1")
    router = await stage.router("r1")
    old = router.state
    stage.pool.replace()
    await until(lambda: router.state is not old)
    await until(lambda: set(router.state.loads.workers) == {"w1"} and not router.state.cold)
    assert router.state.log == await stage.pool.identity() != old.log
    last = (await stage.pool.bounds()).last
    await until(lambda: router.state.position >= last)


@staged
async def test_snapshots_of_a_replaced_log_are_not_used(stage: Stage) -> None:
    """Also where the new log has grown past their position."""
    await stage.engine("w1")
    router = await stage.router("r1")
    await asyncio.sleep(3.0)
    router.stop()
    await until(lambda: not stage.fleet.processes["r1"].group.tasks)
    assert await stage.fleet.store.blobs.names(subjects.snapshot_prefix(POOL)), "it saved one on stopping"
    stopped_at = router.state.position
    again = await stage.router("r2")
    assert again.state.position >= stopped_at
    assert set(again.state.loads.workers) == {"w1"}
    await stage.kill("r2")
    await stage.kill("w1")
    stage.pool.replace()
    writer = Writer(
        stage.pool, subjects.pool_subject(NAMESPACE, POOL, "load", "x"), "x", 1, stage.world("x")[0]
    )
    for _ in range(stopped_at + 50):
        await stage.pool.append(*await writer.first_entries())
    last = await stage.router("r3")
    assert last.state.loads.workers == {}
    assert last.state.position >= stopped_at + 50


async def watching(stage: Stage, *workers: str) -> tuple[LeaseReconciler, Writer, Any]:
    """A watch, with these workers' leases in the table, and the table."""
    process, world = stage.world("watch")
    fleet = Writer(stage.pool, subjects.pool_subject(NAMESPACE, POOL, "fleet", "r1"), "r1", 1, process)
    for worker in workers:
        lease = msgspec.json.encode(Lease(kind="worker", name=worker, pool=POOL, epoch=1))
        await world.leases.put(subjects.lease_key("worker", worker), lease)
    await world.leases.put(
        subjects.lease_key("worker", "stranger"),
        msgspec.json.encode(Lease(kind="worker", name="stranger", pool="other", epoch=1)),
    )
    watch = LeaseReconciler(world, POOL, fleet)
    process.start(watch.watch_leases(), "leases")
    process.start(fleet.run(), "fleet")
    await watch.wait_known()
    return watch, fleet, world.leases


@staged
async def test_a_worker_without_a_lease_is_told_gone_once(stage: Stage) -> None:
    """After `ROUNDS` looks in a row, once for each life; a lease that was back in between starts the count anew."""
    watch, fleet, leases = await watching(stage, "w1")
    state = fold([record(1, joined("w1", 1)), record(2, joined("w2", 7), writer="w2", epoch=7)])
    assert [watch.find_lapsed(state) for _ in range(ROUNDS)] == [[]] * (ROUNDS - 1) + [[("w2", 7)]]
    watch.publish_left(("w2", 7))
    assert watch.find_lapsed(state) == []
    await leases.delete(subjects.lease_key("worker", "w1"))
    await asyncio.sleep(0.5)
    assert watch.find_lapsed(state) == []
    await leases.put(
        subjects.lease_key("worker", "w1"),
        msgspec.json.encode(Lease(kind="worker", name="w1", pool=POOL, epoch=1)),
    )
    await asyncio.sleep(0.5)
    assert [watch.find_lapsed(state) for _ in range(3)] == [[]] * 3
    await fleet.flush()
    assert events_of(await stage.records(), WorkerLeft) == [WorkerLeft("w2", 7, "lease lapsed")]


@staged
async def test_doubtful_workers_are_asked_at_growing_intervals(stage: Stage) -> None:
    """Not in the first moment, when the joining may be under way; then ever more rarely, and at once a next time."""
    watch, _, _ = await watching(stage, "w1", "w2")
    state = RouterState()
    state.apply(record(1, joined("w1", 1)))
    at: list[float] = []
    began = stage.clock.time()
    while len(at) < 8:
        due = watch.find_unsynced(state)
        assert due in ([], ["w2"])
        if due:
            at.append(stage.clock.time() - began)
        await asyncio.sleep(PERIOD_S / 10)
    pauses = [later - earlier for earlier, later in pairwise(at)]
    wanted = [min(RESYNC_PAUSE_S * 2**number, RESYNC_PAUSE_S_MAX) for number in range(7)]
    assert at[0] == pytest.approx(PERIOD_S, abs=0.06)
    assert pauses == [pytest.approx(pause, abs=0.06) for pause in wanted]
    state.apply(record(2, joined("w2", 1), writer="w2"))
    assert watch.find_unsynced(state) == []
    state.cold.add("w2")
    assert watch.find_unsynced(state) == []
    await asyncio.sleep(PERIOD_S)
    assert watch.find_unsynced(state) == ["w2"]
