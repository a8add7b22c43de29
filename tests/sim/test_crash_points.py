"""A process may die between any two steps: what it leaves is the state before or the state after, never between."""

import asyncio

import numpy as np

from headwater.actors.runtime import lease
from headwater.actors.runtime.ports import Ports
from headwater.actors.worker.actor import WorkerActor
from headwater.actors.worker.model_card import Served
from headwater.engines.sim.engine import SimEngine
from headwater.events.ports import Log, Record
from headwater.events.snapshot_store import Snapshot, SnapshotStore
from headwater.events.writer import Writer, WriterFenced, stored
from headwater.ops.sim.checks import fences, folded, messages
from headwater.ops.sim.fleet import FILES, MODEL, NAMESPACE, POOL, SETTINGS
from headwater.router.state import RouterState
from headwater.schemas import subjects
from headwater.schemas.events import KvGap
from headwater.schemas.subjects import pool_subject
from tests.sim.crash import Scene, every_crash

KV = pool_subject(NAMESPACE, POOL, "kv", "w")
FLEET = pool_subject(NAMESPACE, POOL, "fleet", "w")
EVENTS = 40


async def writers(world: Ports, epoch: int) -> tuple[Log, Writer, Writer]:
    """The fleet and cache writers of one life of worker w."""
    log = await world.pool_log(POOL)
    return (
        log,
        Writer(log, FLEET, "w", epoch, world.clock),
        Writer(log, KV, "w", epoch, world.clock, fence=FLEET),
    )


async def one_life(world: Ports, epoch: int, number: int) -> None:
    """Begin atomically in both subjects, then stream events in bursts."""
    log, fleet, kv = await writers(world, epoch)
    entries = [*await fleet.first_entries(KvGap(number)), *await kv.first_entries(KvGap(number + 1))]
    await stored(lambda: log.append(*entries), world.clock, FLEET)
    running = asyncio.ensure_future(kv.run())
    for burst in range(4):
        for at in range(EVENTS // 4):
            kv.offer(KvGap(number + 2 + burst * EVENTS // 4 + at))
        await world.clock.sleep(0.003)
    await kv.flush()
    running.cancel()


def numbers(records: list[Record], subject: str, epoch: int) -> list[int]:
    """What one life wrote to a subject."""
    return [
        event.missing
        for record in records
        if record.subject == subject and record.batch.epoch == epoch
        for event in record.batch.events
        if isinstance(event, KvGap)
    ]


def test_an_append_is_there_or_not() -> None:
    """The beginning of a life is in both subjects or in neither; of what follows a prefix, each event once."""
    beginnings: set[bool] = set()
    lengths: set[int] = set()

    async def after(scene: Scene, died: bool) -> None:
        _, world = scene.process("second")
        await one_life(world, 2, 1000)
        found = await messages(scene.fleet.store.pool(POOL))
        assert list(fences(found)) == []
        state = RouterState()
        records = [message for message in found if isinstance(message, Record)]
        assert [state.apply(record) for record in records] == [None] * len(found)
        began = numbers(records, FLEET, 1) == [0]
        streamed = numbers(records, KV, 1)
        assert streamed == list(range(1, 1 + len(streamed)))
        assert began == bool(streamed)
        assert numbers(records, KV, 2) == list(range(1001, 1002 + EVENTS))
        assert died or len(streamed) == EVENTS + 1
        beginnings.add(began)
        lengths.add(len(streamed))

    runs = list(every_crash(lambda world: one_life(world, 1, 0), after))
    assert beginnings == {True, False}
    assert len(lengths) > 3, f"{len(runs)} runs met only {lengths}"


def test_a_snapshot_is_the_old_or_the_new_one() -> None:
    """Whenever its writer dies, the newest readable snapshot is whole, and it is one of the two."""
    seen: set[int] = set()

    def snapshot(position: int) -> Snapshot:
        return Snapshot(position, {"n": position}, {"a": np.full(5000, position, np.uint64)})

    async def save(world: Ports) -> None:
        await SnapshotStore(world.blobs, POOL).save(snapshot(1))
        await SnapshotStore(world.blobs, POOL).save(snapshot(2))
        await SnapshotStore(world.blobs, POOL).save(snapshot(3))

    async def after(scene: Scene, died: bool) -> None:
        _, world = scene.process("second")
        store = SnapshotStore(world.blobs, POOL)
        found = await store.newest(lambda _: True)
        seen.add(found.position if found else 0)
        if found is not None:
            assert found.facts == {"n": found.position}
            assert found.arrays["a"].tolist() == [found.position] * 5000
        assert died or (found is not None and found.position == 3)
        await store.save(snapshot(4))
        found = await store.newest(lambda _: True)
        assert found is not None
        assert found.position == 4

    list(every_crash(save, after))
    assert seen == {0, 1, 2, 3}


def test_a_lease_is_held_or_lapses() -> None:
    """A holder that dies while it takes, renews or gives back leaves a lease that lapses, and a higher epoch next."""
    waited: set[bool] = set()

    async def hold(world: Ports) -> None:
        held = await lease.take(world.leases, "worker", "w", world.clock, ids="first")
        holding = asyncio.ensure_future(held.hold())
        await world.clock.sleep(2.5)
        holding.cancel()
        await held.release()

    async def after(scene: Scene, died: bool) -> None:
        _, world = scene.process("second")
        before = await world.leases.get("worker.w")
        began = scene.clock.time()
        next_one = await lease.take(world.leases, "worker", "w", world.clock, ids="second")
        took_s = scene.clock.time() - began
        assert took_s < lease.TTL_S + 2 * lease.RETRY_S
        assert before is None or next_one.epoch > before.revision
        assert died or took_s < lease.RETRY_S
        waited.add(took_s > lease.RETRY_S)
        await next_one.release()
        assert await world.leases.get("worker.w") is None

    list(every_crash(hold, after))
    assert waited == {True, False}


def test_a_worker_is_handed_over_whole() -> None:
    """A worker that dies while it joins, serves, drains or leaves: its successor is the only one in the fold."""
    left_behind: set[int] = set()

    def actor(world: Ports) -> WorkerActor:
        engine = SimEngine(SETTINGS, world.clock)
        return WorkerActor(world, "w", engine, Served(MODEL, FILES), drain_s=1.0)

    async def live(world: Ports) -> None:
        one = actor(world)
        running = asyncio.ensure_future(one.run())
        await one.ready.wait()
        await world.clock.sleep(1.2)
        one.stop()
        assert await running == ""

    async def after(scene: Scene, died: bool) -> None:
        log = scene.fleet.store.pool(POOL)
        before = folded(await messages(log), whole=True)
        left_behind.add(len(before.loads.workers))
        assert died or before.loads.workers == {}
        process, world = scene.process("second")
        one = actor(world)
        running = process.start(one.run(), "actor")
        await one.ready.wait()
        found = await messages(log)
        assert list(fences(found)) == []
        state = folded(found, whole=True)
        [worker] = state.loads.workers.values()
        assert worker.epoch > max((w.epoch for w in before.loads.workers.values()), default=0)
        assert state.cold == set()
        assert state.index.blocks == {"w": 0}
        one.stop()
        assert await running == ""
        assert folded(await messages(log), whole=True).loads.workers == {}
        assert await world.leases.get(subjects.lease_key("worker", "w")) is None

    list(every_crash(live, after))
    assert left_behind == {0, 1}


def test_a_fenced_writer_notices() -> None:
    """A life that goes on after its successor has begun learns it at its next append."""

    async def work(world: Ports) -> None:
        await one_life(world, 1, 0)

    async def after(scene: Scene, died: bool) -> None:
        _, world = scene.process("second")
        await one_life(world, 2, 100)
        _, old = scene.process("zombie")
        _, _, kv = await writers(old, 1)
        running = asyncio.ensure_future(kv.run())
        kv.offer(KvGap(7))
        await asyncio.wait([running])
        assert isinstance(running.exception(), WriterFenced)

    for _ in zip(range(3), every_crash(work, after), strict=False):
        pass
