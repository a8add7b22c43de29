"""The ready gate: what comes for a worker before it is in the log waits for it; and at the edge for the first one."""

import asyncio

import msgspec

from headwater.actors.edge.actor import EdgeActor
from headwater.actors.edge.saga.types import PLACE_S_MAX
from headwater.actors.worker.incarnation import WAIT_S_MAX, WAITING_MAX
from headwater.ops.sim.fleet import NAMESPACE
from headwater.ops.sim.network import SimHttpServer
from headwater.schemas import subjects
from headwater.schemas.events import WorkerChanged, WorkerControlled
from headwater.schemas.inference import Accepted, Cancel, Refused
from tests.support.worlds.control import HeldLog, Worker, start
from tests.support.worlds.virtual import Stage, events_of, staged, until


async def at_the_gate(stage: Stage, joins: asyncio.Event) -> Worker:
    """A worker that has its lease and is not in the log before `joins`."""
    worker = await start(stage, log=lambda log: HeldLog(log, joins.wait))
    await until(lambda: len(worker.actor._subscriptions) > 0, 5.0)
    assert worker.actor.incarnation is None
    return worker


@staged
async def test_requests_before_the_joining_wait_for_it_in_order(stage: Stage) -> None:
    """Answered once the log knows of the worker; a cancel that overtook nothing still counts."""
    joins = asyncio.Event()
    worker = await at_the_gate(stage, joins)
    waiting = [asyncio.ensure_future(worker.given(number)) for number in (1, 2, 3)]
    await asyncio.sleep(0.05)
    cancel = subjects.engine(NAMESPACE, "w1", worker.actor.epoch, "cancel")
    await worker.asks.bus.publish(cancel, msgspec.msgpack.encode(Cancel(("r2-0-1",))))
    await asyncio.sleep(0.5)
    assert worker.actor._ready_gate.waiting == 4
    assert not any(one.done() for one in waiting)
    assert [one.request for one in worker.engine.asked if "canary" not in one.request] == []
    joins.set()
    assert await asyncio.gather(*waiting) == [Accepted()] * 3
    taken = [one.request for one in worker.engine.asked if "canary" not in one.request]
    assert sorted(taken) == ["r1-0-1", "r2-0-1", "r3-0-1"]
    await until(lambda: sorted(worker.actor.inflight.names) == ["r1-0-1", "r3-0-1"])


@staged
async def test_nobody_waits_at_the_gate_for_ever(stage: Stage) -> None:
    """Before the edge gives up by itself it hears that another worker may be better; so does who is too many."""
    worker = await at_the_gate(stage, asyncio.Event())
    began = stage.clock.time()
    waiting = [asyncio.ensure_future(worker.given(number)) for number in range(1, WAITING_MAX + 2)]
    answers = await asyncio.gather(*waiting)
    assert all(isinstance(one, Refused) and one.retryable for one in answers)
    assert WAIT_S_MAX <= stage.clock.time() - began < WAIT_S_MAX + 0.1
    assert [one.reason for one in answers].count(
        f"worker w1: {WAITING_MAX} requests are waiting for it to become ready"
    ) == 1
    assert worker.actor._ready_gate.waiting == 0


@staged
async def test_an_edge_waits_for_the_first_worker_of_a_model(stage: Stage) -> None:
    """The card is there and its only worker is still starting: the client gets its answer, not a 503."""
    # An earlier life left the card.
    first = await start(stage, "w0")
    await until(first.actor.ready.is_set, 5.0)
    first.actor.stop()
    await until(lambda: first.ended is not None, 5.0)
    await stage.router("r1")
    process, world = stage.world("edge-0")
    server = SimHttpServer(stage.fleet.network, stage.clock, "edge-0")
    edge = EdgeActor(world, "edge-0", server, drain_s=1.0)
    process.start(edge.run(), "actor")
    await until(edge.ready.is_set, 5.0)
    body = msgspec.json.encode({"model": "sim", "prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True})
    connection = server.connect("/v1/completions", body, [])
    await asyncio.sleep(6.0)
    assert connection.status == 0, "it waits"
    await start(stage, "w1")
    await until(lambda: connection.ended, 5.0)
    assert connection.status == 200
    await stage.kill("w1")
    late = server.connect("/v1/completions", body, [])
    took = await until(lambda: late.ended, 30.0)
    assert (late.status, round(took)) == (503, PLACE_S_MAX)


@staged
async def test_a_status_that_changes_while_the_worker_joins_is_published(stage: Stage) -> None:
    """The joining event was encoded before: without another one no router would know of the taint."""
    joins = asyncio.Event()
    worker = await at_the_gate(stage, joins)
    await asyncio.sleep(0.2)
    assert (await worker.told("taint", name="spot")).status == 200
    joins.set()
    await until(worker.actor.ready.is_set, 5.0)
    await asyncio.sleep(0.2)
    records = await stage.records()
    assert [one.taints for one in events_of(records, WorkerChanged)] == [(), ("spot",)]
    assert [one.command for one in events_of(records, WorkerControlled)] == ["taint"]
