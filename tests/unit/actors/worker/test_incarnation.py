"""One life of a worker in the log: begun at once, announced anew when asked, never mixed with the life before."""

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.actors.runtime import lease
from headwater.actors.runtime.ports import Message
from headwater.actors.worker.actor import WorkerActor
from headwater.actors.worker.handoffs import Handoffs
from headwater.actors.worker.incarnation import CommandAudit, Incarnation
from headwater.actors.worker.inflight import Inflight, WorkerStatus
from headwater.actors.worker.lora import LoraGate
from headwater.actors.worker.model_card import Served
from headwater.actors.worker.settings import WorkerProfile
from headwater.engines.engine import KvEvent
from headwater.engines.sim.engine import SimEngine
from headwater.events.memory import MemoryLog
from headwater.events.ports import AppendResult, Entry
from headwater.ops.sim.fleet import FILES, MODEL, NAMESPACE, POOL, SETTINGS
from headwater.router.state import RouterState
from headwater.schemas import subjects
from headwater.schemas.events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    LoadReported,
    RequestsHeld,
    WorkerChanged,
    WorkerJoined,
)
from headwater.schemas.hashing import pack_tokens, unpack_hashes
from headwater.schemas.inference import GenerateRequest, Sampling
from tests.support.data.examples import packed
from tests.support.worlds.virtual import Stage, another_takes_the_lease, events_of, staged, until
from tests.unit.router.test_load_order import STEPS_NS, Fleet


def generate(number: int, tokens: int = 20) -> GenerateRequest:
    """A request of four blocks."""
    return GenerateRequest(
        f"r{number}-0-1", "e1", number, pack_tokens([number] * 64), Sampling(tokens, ignore_eos=True)
    )


async def give(stage: Stage, worker: WorkerActor, *requests: GenerateRequest) -> None:
    """Hand requests to the worker's engine as its `generate` subject does."""
    for request in requests:
        await worker.intake.on_generate(Message("", msgspec.msgpack.encode(request), "_INBOX.nobody"))
    await asyncio.sleep(0)


class CountingLog:
    """The pool log; notes what each append held."""

    def __init__(self, log: MemoryLog) -> None:
        self.appends: list[list[str]] = []
        self._log = log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    async def append(self, *entries: Entry, deadline_s: float = 5.0) -> AppendResult:
        """See `Log.append`."""
        self.appends.append([subjects.pool_kind(entry.subject) for entry in entries])
        return await self._log.append(*entries)


async def a_life(stage: Stage, log: Any, engine: SimEngine, active: list[str]) -> Incarnation:
    """An incarnation of worker w1 with pooling requests in flight, not in the log yet."""
    _, world = stage.world("w1")
    held = await lease.take(world.leases, "worker", "w1", world.clock, pool=POOL, ids="x")
    info = await engine.start()
    status = WorkerStatus("w1", WorkerProfile(), asyncio.Event())
    gate = LoraGate(engine, lambda work, _: asyncio.create_task(work))
    inflight = Inflight(world.clock, gate, Handoffs("w1", world.clock, engine.choreography))
    for request in active:
        inflight.accept_embedding(request)
    return Incarnation(world, held, log, engine, info, inflight, status, CommandAudit())


@staged
async def test_a_life_begins_in_one_append(stage: Stage) -> None:
    """Fleet first, then the cache and the requests: whoever sees one of them sees all."""
    log = CountingLog(stage.pool)
    engine = SimEngine(SETTINGS, stage.world("engine")[0])
    life = await a_life(stage, log, engine, ["a", "b"])
    assert await life.join() == 3
    assert log.appends == [["fleet", "kv", "load"]]
    records = await stage.records()
    assert [type(event) for one in records for event in one.batch.events] == [
        WorkerJoined,
        WorkerChanged,
        BlocksCleared,
        RequestsHeld,
        LoadReported,
    ]
    assert events_of(records, RequestsHeld) == [RequestsHeld(("a", "b"))]
    assert {(one.batch.epoch, one.batch.seq) for one in records} == {(life.epoch, 1)}
    await engine.stop()


@staged
async def test_an_encode_worker_pairs_by_the_format_of_its_embeddings(stage: Stage) -> None:
    """The one that its profile names, else its engine's name; other workers pair by their engine's KV."""
    formats = {}
    for name, profile in {
        "named": WorkerProfile("encode", embedding_format="qwen2-vl"),
        "unnamed": WorkerProfile("encode"),
        "both": WorkerProfile(embedding_format="qwen2-vl"),
    }.items():
        process, world = stage.world(name)
        engine = SimEngine(SETTINGS, process)
        actor = WorkerActor(world, name, engine, Served(MODEL, FILES), profile=profile)
        process.start(actor.run(), "actor")
        await until(actor.ready.is_set)
        formats[name] = events_of(await stage.records(), WorkerJoined)[-1].pairs_with
    assert formats == {"named": "qwen2-vl", "unnamed": "sim", "both": f"sim/{SETTINGS.model}"}


@staged
async def test_what_is_held_is_not_told_again_as_news(stage: Stage) -> None:
    """Events from before `held_blocks` are in what it returned; those from after it come."""
    engine = SimEngine(SETTINGS, stage.world("engine")[0])
    await engine.start()
    ended: list[str] = []

    async def through(number: int) -> None:
        engine.submit(generate(number), lambda step: ended.append(step.finish) if step.finish else None)
        before = len(ended)
        await until(lambda: len(ended) > before)

    await through(1)
    held = engine.held_blocks()
    assert len(b"".join(event.hashes for event in held)) >= 4 * 8
    got: list[KvEvent] = []

    async def pump() -> None:
        async for events in engine.kv_events():
            got.extend(events)

    pumping = asyncio.ensure_future(pump())
    await asyncio.sleep(1.0)
    assert got == []
    await through(2)
    await asyncio.sleep(1.0)
    assert got
    known = {event.hashes[at : at + 8] for event in held for at in range(0, len(event.hashes), 8)}
    fresh = [event for event in got if isinstance(event, BlocksStored)]
    assert not known & {event.hashes[at : at + 8] for event in fresh for at in range(0, len(event.hashes), 8)}
    pumping.cancel()
    await engine.stop()


@staged
async def test_what_an_onlooker_sees_is_told_nevertheless(stage: Stage) -> None:
    """Blocks evicted for a step are told behind it, also where somebody looked at the cache meanwhile."""
    engine = SimEngine(SETTINGS._replace(total_blocks=6), stage.world("engine")[0])
    await engine.start()
    got: list[KvEvent] = []
    ended: list[str] = []

    async def pump() -> None:
        async for events in engine.kv_events():
            got.extend(events)

    pumping = asyncio.ensure_future(pump())
    for number in (1, 2):
        engine.submit(generate(number), lambda step: ended.append(step.finish) if step.finish else None)
        looked = False
        while len(ended) < number:
            await asyncio.sleep(0.001)
            looked |= bool(engine.load().running and engine.cached_blocks())
        assert looked
    await asyncio.sleep(1.0)
    told: set[int] = set()
    for event in got:
        if isinstance(event, BlocksStored):
            told.update(unpack_hashes(event.hashes).tolist())
        elif isinstance(event, BlocksRemoved):
            told.difference_update(unpack_hashes(event.hashes).tolist())
    assert any(isinstance(event, BlocksRemoved) for event in got)
    assert told == {block for run in engine.held_blocks() for block in unpack_hashes(run.hashes).tolist()}
    pumping.cancel()
    await engine.stop()


@staged
async def test_a_resync_asked_again_before_it_is_told_is_not_told_twice(stage: Stage) -> None:
    """Once it is in the log, the next one is; events of the cache that wait are no reason to leave it out."""
    engine = SimEngine(SETTINGS, stage.world("engine")[0])
    life = await a_life(stage, stage.pool, engine, [])
    await life.join()
    writers = [asyncio.ensure_future(one.run()) for one in (life.fleet, life.kv, life.load)]

    async def cleared() -> int:
        return len(events_of(await stage.records(), BlocksCleared))

    assert await cleared() == 1
    for _ in range(3):
        await life.resync()
    await life.kv.flush()
    assert await cleared() == 2
    for block in (1, 2, 3):
        life.offer_kv_events([BlocksStored(0, packed(block))])
        assert life.kv.pending
        await life.resync()
        assert life.kv.pending, "the announcement"
        await life.resync()
        await life.kv.flush()
        assert await cleared() == 2 + block
    for writer in writers:
        writer.cancel()
    await engine.stop()


@staged
async def test_an_idle_worker_reannounces_what_its_full_queue_refused(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the queue is empty, without another event of the engine; and only once."""
    engine = SimEngine(SETTINGS, stage.world("engine")[0])
    life = await a_life(stage, stage.pool, engine, [])
    await life.join()
    monkeypatch.setattr("headwater.events.writer.PENDING_EVENTS_MAX", 3)
    life.offer_kv_events([BlocksStored(0, packed(block)) for block in range(1, 6)])
    assert (life.kv.pending, life.kv.refused) == (3, 2)
    writing = asyncio.ensure_future(life.kv.run())
    await life.kv.flush()
    await asyncio.sleep(1.0)
    told = [event for one in await stage.records() for event in one.batch.events]
    kv = [type(event) for event in told if isinstance(event, BlocksStored | BlocksCleared)]
    assert kv == [BlocksCleared, *[BlocksStored] * 3, BlocksCleared]
    writing.cancel()
    await engine.stop()


@staged
async def test_a_busy_worker_that_is_asked_is_not_cold_for_long(stage: Stage) -> None:
    """Its announcement, its state in a fold of the log, and the requests that it has."""
    worker = await stage.engine("w1")
    await give(stage, worker, *(generate(number, 400) for number in range(4)))
    await asyncio.sleep(0.5)
    _, world = stage.world("router")
    for _ in range(2):
        await world.bus.request(subjects.resync(NAMESPACE, "w1"), b"", timeout_s=2.0)
        await asyncio.sleep(0.3)
    state = RouterState()
    for one in await stage.records():
        assert state.apply(one) is None
    assert state.cold == set()
    held = events_of(await stage.records(), RequestsHeld)
    assert len(held) == 3
    assert set(held[-1].requests) == {f"r{number}-0-1" for number in range(4)}


@staged
async def test_progress_is_told_before_what_is_held(stage: Stage) -> None:
    """What ended just before an announcement is told as ended before it: behind it, it would be kept for ever."""
    worker = await stage.engine("w1")
    await asyncio.sleep(0.5)
    await give(stage, worker, generate(1, 400))
    await asyncio.sleep(0.002)
    worker.engine.abort("r1-0-1")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert worker.inflight._finished == ["r1-0-1"], "ended, and not told yet"
    assert worker.incarnation is not None
    worker.incarnation.announce()
    await asyncio.sleep(1.0)
    told = [event for one in await stage.records() for event in one.batch.events]
    finished = next(at for at, event in enumerate(told) if isinstance(event, LoadReported) and event.finished)
    held = max(at for at, event in enumerate(told) if isinstance(event, RequestsHeld))
    assert finished < held
    state = RouterState()
    for one in await stage.records():
        state.apply(one)
    assert set(state.loads.early) == {f"w1.{worker.intake.frames.epoch}/r1-0-1"}, (
        "its decision is not there yet"
    )


class SlowToAbort(SimEngine):
    """An engine that goes on with a request for a while after it was told to stop."""

    def abort(self, request: str) -> None:
        """See `Engine.abort`."""
        asyncio.get_running_loop().call_later(2.0, super().abort, request)


@staged
async def test_progress_of_an_earlier_life_is_not_told_in_the_next(stage: Stage) -> None:
    """Another holds the lease for a moment: the next life begins with no requests and speaks of none of them."""
    worker = await stage.engine("w1", SlowToAbort)
    await give(stage, worker, *(generate(number, 400) for number in range(3)))
    await asyncio.sleep(0.2)
    assert len(worker.inflight) == 3
    first = worker.intake.frames.epoch
    process = stage.fleet.processes["w1"]
    process.cut()
    await asyncio.sleep(lease.TTL_S + 1.0)
    assert await stage.fleet.store.leases.get(subjects.lease_key("worker", "w1")) is None
    await another_takes_the_lease(stage, "w1")
    process.heal()
    await until(lambda: worker.incarnation is None)
    assert worker.stats()["state"] == "starting", "ready are those that hold their lease"
    await until(lambda: worker.stats()["state"] == "ready")
    assert worker.incarnation is not None
    assert worker.intake.frames.epoch > first
    assert len(worker.inflight) == 3, "the engine still has them"
    await give(stage, worker, generate(9))
    await asyncio.sleep(5.0)
    later = [one for one in await stage.records() if one.batch.epoch > first]
    reports = events_of(later, LoadReported)
    named = {name for one in reports for name in (*one.accepted, *one.prefilled, *one.finished)}
    assert named == {"r9-0-1"}
    assert [one.requests for one in events_of(later, RequestsHeld)] == [()]


class HoldingFleet(Fleet):
    """Workers that now and then tell all requests that they have."""

    def hold(self, worker: str) -> None:
        """As the actor does: first how everything got on, then what is left of it."""
        known = self.live.workers.get(worker)
        if known is None:
            return
        self.report(worker)
        mine = {key: stage for key, stage in self.stages.items() if key[:2] == (worker, known.epoch)}
        held = tuple(request for (_, _, request), stage in mine.items() if stage in (1, 2))
        self.log(RequestsHeld(held), worker, known.epoch)

    def lose_report(self, worker: str) -> None:
        """Progress that the log lost."""
        logged, self.log = self.log, lambda *_: None  # type: ignore[method-assign]
        try:
            self.report(worker)
        finally:
            self.log = logged  # type: ignore[method-assign]

    def turn(self) -> None:
        """Something happens."""
        kind = self.draw(5)
        worker = ("w1", "w2")[self.draw(1)]
        if kind == 0:
            self.hold(worker)
        elif kind == 1:
            self.lose_report(worker)
        else:
            super().turn()


@given(st.randoms(use_true_random=False), st.integers(1, 120), STEPS_NS)
def test_what_is_held_commutes_with_late_decisions(draw: Any, turns: int, step_ns_max: int) -> None:
    """Decided at once or read later, with reports lost in between: the same loads in the end."""
    fleet = HoldingFleet(lambda most: draw.randint(0, most), step_ns_max)
    for _ in range(turns):
        fleet.turn()
    fleet.settle()
    assert fleet.live == fleet.replay


@given(st.randoms(use_true_random=False), st.integers(1, 120))
def test_what_is_held_ends_what_the_worker_no_longer_has(draw: Any, turns: int) -> None:
    """However many reports were lost: what counts as accepted afterwards is what the worker named."""
    fleet = HoldingFleet(lambda most: draw.randint(0, most), 0)
    # Of a worker that joined again the fold does not know what it had before.
    fleet.rejoins = False
    for _ in range(turns):
        fleet.turn()
    fleet.settle()
    for worker in ("w1", "w2"):
        fleet.hold(worker)
        known = fleet.live.workers.get(worker)
        if known is None:
            continue
        running = {
            request
            for (name, epoch, request), stage in fleet.stages.items()
            if (name, epoch) == (worker, known.epoch) and stage in (1, 2)
        }
        assert {request for request, active in known.requests.items() if active.stage} == running
        assert running | set(known.unaccepted) == set(known.requests)
