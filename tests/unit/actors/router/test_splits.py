"""Traffic splits as an operator gives them to a router: what it answers, stores, and publishes again after a gap; and events it does not know."""

import asyncio
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from headwater.actors.worker.control import request_split
from headwater.events.ports import Entry, Gap
from headwater.ops.sim.fleet import NAMESPACE, POOL
from headwater.schemas import subjects
from headwater.schemas.control import ShareStatus, SplitReply, SplitRequest
from headwater.schemas.encoding import SCHEMA_VERSION, Batch, seal
from headwater.schemas.events import Event, SplitSubject, TrafficSplit
from tests.support.worlds.virtual import Stage, events_of, staged, until
from tests.unit.actors.router.test_actor import asked


async def split(
    stage: Stage, shares: dict[str, float] | None, after: int = 0, subject: SplitSubject = "revision"
) -> SplitReply:
    """An operator's command; None shows what applies."""
    if "operator" not in stage.fleet.processes:
        stage.operator = stage.world("operator")[1]  # type: ignore[attr-defined]
    event = None if shares is None else TrafficSplit(subject, shares, after, "me", "why")
    return await request_split(stage.operator, POOL, SplitRequest(subject, event))  # type: ignore[attr-defined]


async def mixed(stage: Stage, routers: int = 1) -> None:
    """A worker of each of two revisions, and routers."""
    for name, revision in (("w1", "old"), ("w2", "new")):
        actor = await stage.engine(name, revision=revision)
        assert actor.status.revision == revision
    for number in range(routers):
        await stage.router(f"r{number}")


@staged
async def test_a_split_is_stored_folded_by_every_router_and_removed_again(stage: Stage) -> None:
    """One router answers; each routes by it; the log has who asked and why."""
    await mixed(stage, 2)
    shown = await split(stage, None)
    assert (shown.reply.status, shown.position, shown.split) == (200, 0, None)
    assert shown.members == (ShareStatus("new", None, 1, 1, 0), ShareStatus("old", None, 1, 1, 0))
    told = await split(stage, {"new": 1.0})
    assert told.reply.status == 200
    assert told.split is not None
    assert told.since_ns > 0
    for router in stage.routers.values():
        await until(lambda router=router: router.state.loads.shares("revision") == {"new": 1.0})  # type: ignore[misc]
    labels = {"pool": POOL, "of": "revision", "name": "new"}
    assert REGISTRY.get_sample_value("headwater_router_traffic_share", labels) == 1.0
    for number in range(10):
        decision = await asked(stage, f"a{number}-0-1")
        assert (decision.worker, decision.revision) == ("w2", "new")
    assert (await split(stage, {}, told.position)).reply.detail == "traffic split removed"
    assert [(one.by, one.reason) for one in events_of(await stage.records(), TrafficSplit)] == [
        ("me", "why")
    ] * 2


@staged
async def test_a_split_that_names_another_one_is_refused(stage: Stage) -> None:
    """It was made for what applied before: 409, what applies is in the answer, and nothing is stored."""
    await mixed(stage)
    first = await split(stage, {"new": 1.0})
    late = await split(stage, {"old": 1.0})
    assert late.reply.status == 409
    assert "another split applies since position" in late.reply.detail
    assert "set by me: look again" in late.reply.detail
    assert late.split == first.split
    assert len(events_of(await stage.records(), TrafficSplit)) == 1
    assert (await split(stage, {"old": 1.0}, first.position)).reply.status == 200


@staged
async def test_of_two_commands_at_once_one_is_carried_out(stage: Stage) -> None:
    """Both are written, as neither was stored when the other came; the fold takes one, and the other's sender is told."""
    await mixed(stage, 2)
    await split(stage, None)
    told = await asyncio.gather(split(stage, {"new": 1.0}), split(stage, {"old": 1.0}))
    assert sorted(one.reply.status for one in told) == [200, 409]
    assert len(events_of(await stage.records(), TrafficSplit)) == 2
    [done] = [one for one in told if one.reply.status == 200]
    assert done.split is not None
    for router in stage.routers.values():
        await until(lambda router=router: router.state.loads.shares("revision") == done.split.shares)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("shares", "subject", "detail"),
    [
        (
            {"newer": 1.0},
            "revision",
            "no worker of this pool is of revision 'newer'; its revisions are: new, old",
        ),
        ({"new": 0.0}, "revision", "every share is 0"),
        ({"oracle": 1.0}, "policy", "unknown policy oracle"),
    ],
)
@staged
async def test_a_split_that_makes_no_sense_changes_nothing(
    stage: Stage, shares: dict[str, float], subject: SplitSubject, detail: str
) -> None:
    """The answer names the mistake."""
    await mixed(stage)
    told = await split(stage, shares, subject=subject)
    assert told.reply.status == 400
    assert told.reply.detail.startswith(detail)
    assert events_of(await stage.records(), TrafficSplit) == []


@staged
async def test_without_a_router_the_answer_says_so(stage: Stage) -> None:
    """404, and what to do."""
    told = await split(stage, None)
    assert told.reply.status == 404
    assert told.reply.detail.startswith(f"no router of pool {POOL} answers: start one")


@staged
async def test_bytes_that_are_no_command_are_refused(stage: Stage) -> None:
    """An operator of another release."""
    await mixed(stage)
    ports: Any = stage.world("operator")[1]
    subject = subjects.traffic_split(NAMESPACE, POOL)
    answer = await ports.bus.request(subject, b"\xc1", timeout_s=5.0)
    told = msgspec.msgpack.decode(answer, type=SplitReply)
    assert told.reply.status == 400
    assert "check the releases" in told.reply.detail


@staged
async def test_a_split_survives_a_gap_in_the_log(stage: Stage) -> None:
    """The router that knew it publishes it again; one that starts later has it."""
    await mixed(stage)
    await split(stage, {"new": 1.0})
    router = stage.routers["r0"]
    before = router.state
    router._follower._restart_after(Gap(before.position, before.position, "purged"))
    assert router.state.loads.splits == {}
    await until(lambda: router.state.loads.shares("revision") == {"new": 1.0})
    stored = events_of(await stage.records(), TrafficSplit)
    assert [(one.after, one.by) for one in stored] == [(0, "me"), (0, "me")]


@staged
async def test_an_event_of_a_later_release_is_counted_and_said_once(stage: Stage) -> None:
    """The router goes on, and folds what came with it."""

    class Later(Event, frozen=True, tag="fleet.teleported"):
        worker: str

    await mixed(stage)
    router = stage.routers["r0"]
    counter = router._metrics.unknown
    began = counter._value.get()
    subject = subjects.pool_subject(NAMESPACE, POOL, "fleet", "later")
    events = (Later("w1"), TrafficSplit("revision", {"old": 1.0}, 0), Later("w2"))
    with capture_logs() as logs:
        await stage.pool.append(Entry(subject, seal(Batch(SCHEMA_VERSION, "later", 1, 1, 1, events))))
        await until(lambda: router.state.loads.shares("revision") == {"old": 1.0})
    said = [one for one in logs if one["event"] == "log_event_unknown"]
    assert [(one["event_kind"], one["writer"]) for one in said] == [("fleet.teleported", "later")]
    assert counter._value.get() - began == 2
