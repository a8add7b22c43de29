"""Taints of a worker: from its start, by commands, and in the log."""

import asyncio

from headwater.actors.worker.settings import WorkerProfile
from headwater.router.state import RouterState
from headwater.router.worker import Worker
from headwater.schemas.control import ControlReply
from headwater.schemas.events import WorkerControlled
from tests.support.worlds.control import ready
from tests.support.worlds.virtual import Stage, events_of, staged


async def worker_in_fold(stage: Stage) -> Worker:
    """What a router knows of `w1`."""
    state = RouterState()
    for one in await stage.records():
        assert state.apply(one) is None
    return state.loads.workers["w1"]


@staged
async def test_taints_come_and_go_in_the_log(stage: Stage) -> None:
    """The fold knows them from when the worker joins; each change is in the audit, and the same again changes nothing."""
    worker = await ready(stage, profile=WorkerProfile(instance="w1", tier="gold", taints=("spot",)))
    known = await worker_in_fold(stage)
    assert (known.tier, known.taints) == ("gold", ("spot",))
    reply = await worker.told("taint", by="ann@box", name="batch")
    assert reply == ControlReply(200, "tainted batch", {"taints": ["batch", "spot"]})
    assert (await worker.told("taint", name="batch")).detail == "tainted batch already"
    await asyncio.sleep(0.1)
    assert (await worker_in_fold(stage)).taints == ("batch", "spot")
    data = (await worker.told("status")).data
    assert (data["tier"], data["taints"]) == ("gold", ["batch", "spot"])
    reply = await worker.told("untaint", name="spot")
    assert reply == ControlReply(200, "no longer tainted spot", {"taints": ["batch"]})
    assert (await worker.told("untaint", name="spot")).detail == "not tainted spot already"
    assert (await worker.told("taint", name="no.way")).status == 400
    assert (await worker.told("taint")).status == 400
    await asyncio.sleep(0.1)
    audit = events_of(await stage.records(), WorkerControlled)
    assert [(one.command, one.status) for one in audit] == [
        *[("taint", 200)] * 2,
        *[("untaint", 200)] * 2,
        *[("taint", 400)] * 2,
    ]
    assert audit[0].by == "ann@box"
    assert (await worker_in_fold(stage)).taints == ("batch",)
