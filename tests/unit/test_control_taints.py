"""Taints as control commands: in the log, in the fold, and in the audit."""

import asyncio

from headwater.actors.worker_life import Standing
from headwater.schemas.control import ControlReply
from tests.unit.control_records import audited, folded
from tests.unit.control_world import ready
from tests.unit.virtual import Stage, play


def test_taints_come_and_go_in_the_log() -> None:
    """The fold knows them from when the worker joins; each change is in the audit, and the same again changes nothing."""

    async def run(stage: Stage) -> None:
        worker = await ready(stage, standing=Standing(instance="w1", tier="gold", taints=("spot",)))
        known = (await folded(stage)).loads.workers["w1"]
        assert (known.tier, known.taints) == ("gold", ("spot",))
        reply = await worker.told("taint", by="ann@box", name="batch")
        assert reply == ControlReply(200, "tainted batch", {"taints": ["batch", "spot"]})
        assert (await worker.told("taint", name="batch")).detail == "tainted batch already"
        await asyncio.sleep(0.1)
        assert (await folded(stage)).loads.workers["w1"].taints == ("batch", "spot")
        data = (await worker.told("status")).data
        assert (data["tier"], data["taints"]) == ("gold", ["batch", "spot"])
        reply = await worker.told("untaint", name="spot")
        assert reply == ControlReply(200, "no longer tainted spot", {"taints": ["batch"]})
        assert (await worker.told("untaint", name="spot")).detail == "not tainted spot already"
        assert (await worker.told("taint", name="no.way")).status == 400
        assert (await worker.told("taint")).status == 400
        audit = await audited(stage)
        assert [(one.command, one.status) for one in audit] == [
            *[("taint", 200)] * 2,
            *[("untaint", 200)] * 2,
            *[("taint", 400)] * 2,
        ]
        assert audit[0].by == "ann@box"
        assert (await folded(stage)).loads.workers["w1"].taints == ("batch",)

    play(run)
