"""Routers of one pool compare the states that they fold from one log."""

import asyncio
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from headwater.actors.router.actor import RouterActor
from headwater.actors.router.divergence import KEPT_MAX, PERIOD_NS, Marks
from headwater.actors.runtime.ports import Message
from headwater.ops.sim.fleet import NAMESPACE, POOL
from headwater.schemas import subjects
from headwater.schemas.hashing import pack_tokens, unpack_hashes
from headwater.schemas.inference import GenerateRequest, Sampling
from headwater.schemas.routing import StateDigest
from tests.support.worlds.virtual import Stage, staged
from tests.unit.actors.router.test_actor import asked


async def fleet(stage: Stage) -> tuple[RouterActor, RouterActor]:
    """Two workers and two routers, all of which have announced themselves."""
    for name in ("w1", "w2"):
        await stage.engine(name)
    return await stage.router("router-0"), await stage.router("router-1")


async def traffic(stage: Stage, seconds: float, first: int = 0) -> None:
    """Requests for so long, some 4 a second."""
    for number in range(first, first + int(seconds * 4)):
        decision = await asked(stage, f"r{number}-0-1")
        request = GenerateRequest(
            decision.request, "e1", number, pack_tokens([number % 5] * 96), Sampling(20, ignore_eos=True)
        )
        data = msgspec.msgpack.encode(request)
        await stage.workers[decision.worker].intake.on_generate(Message("", data, "_INBOX.nobody"))
        await asyncio.sleep(0.25)


def alarms(*routers: RouterActor) -> list[Any]:
    """What each of them says."""
    return [
        (len(stats["diverged"]), stats["divergence_alarms"] > 0) for stats in (r.stats() for r in routers)
    ]


def test_marks_are_the_first_messages_of_each_period() -> None:
    """The same for whoever reads both neighbours, from whatever message on."""
    times = [at * PERIOD_NS // 7 for at in range(60)]
    marks, late = Marks(), Marks()
    found = [at for at, one in enumerate(times) if marks.is_marked(one)]
    assert found == [7, 14, 21, 28, 35, 42, 49, 56]
    assert [at for at in range(24, 60) if late.is_marked(times[at])] == [28, 35, 42, 49, 56]
    late.reset()
    assert not late.is_marked(60 * PERIOD_NS)


@staged
async def test_routers_that_fold_one_log_never_alarm(stage: Stage) -> None:
    """Over several periods of traffic, in which one is killed and comes back; decisions under way make no difference."""
    one, other = await fleet(stage)
    await traffic(stage, 30.0)
    compared = [router.stats()["compared_position"] for router in (one, other)]
    assert min(compared) > 0
    await stage.kill("router-1")
    other = await stage.router("router-1")
    await traffic(stage, 30.0, 1_000)
    assert alarms(one, other) == [(0, False), (0, False)]
    assert min(router.stats()["compared_position"] for router in (one, other)) > max(compared)


@pytest.mark.parametrize("what", ["index", "loads"])
@staged
async def test_a_fold_that_goes_wrong_is_an_alarm_at_both(stage: Stage, what: str) -> None:
    """Loud, with both routers, the position and both digests; both go on answering."""
    one, other = await fleet(stage)
    await traffic(stage, 25.0)
    assert alarms(one, other) == [(0, False), (0, False)]
    if what == "index":
        # A bit that fell over.
        other.state.index.store("w1", 0, 0, unpack_hashes(b"12345678"))
    else:
        other._follower.logged.workers["w2"].prefill_tokens += 1
    with capture_logs() as logged:
        await traffic(stage, 25.0, 1_000)
    assert alarms(one, other) == [(1, True), (1, True)]
    assert list(one.stats()["diverged"]) == ["router-1"]
    told = [entry for entry in logged if entry["event"] == "routers_diverged"]
    assert {(entry["router"], entry["other"]) for entry in told} == {
        ("router-0", "router-1"),
        ("router-1", "router-0"),
    }
    for entry in told:
        assert entry["log_level"] == "critical"
        assert entry["digest"] != entry["other_digest"]
        assert entry["log_position"] > 0
    for router in (one, other):
        before = router._snapshots._saved_position
        await router._snapshots.save(router._log)
        assert router._snapshots._saved_position == before, "a state in doubt is not kept"
    if what == "index":
        # A snapshot from before the alarm may hold it.
        return
    # The one that was wrong is restarted: it folds anew what is right, and the alarm is over.
    await stage.kill("router-1")
    other = await stage.router("router-1")
    await traffic(stage, 25.0, 2_000)
    assert alarms(one, other) == [(0, True), (0, False)]


@staged
async def test_own_decisions_that_the_log_does_not_hold_are_no_difference(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One router can not write: its state is ahead of the log for good, and what the log told is the same."""
    one, other = await fleet(stage)
    await traffic(stage, 15.0)
    assert one.decisions.writer is not None
    monkeypatch.setattr(one.decisions.writer, "offer", lambda _: True)
    await traffic(stage, 30.0, 1_000)
    assert one._follower.number > one._follower.seen
    assert one.state.digest() != other.state.digest()
    assert alarms(one, other) == [(0, False), (0, False)]
    assert one.stats()["compared_position"] > 0


@staged
async def test_what_can_not_be_compared_is_not(stage: Stage) -> None:
    """Another release, another log, a fold from behind a gap; and a bounded number of digests is kept."""
    await stage.engine("w1")
    router = await stage.router("router-0")
    await stage.engine("w2")
    _, world = stage.world("edge")
    stage.edge = world  # type: ignore[attr-defined]
    heard: list[StateDigest] = []

    async def hear(message: Message) -> None:
        heard.append(msgspec.msgpack.decode(message.data, type=StateDigest))

    await world.bus.subscribe(subjects.digests(NAMESPACE, POOL), hear)
    await traffic(stage, 25.0)
    own = heard[-1]
    assert (own.router, own.since) == ("router-0", 0)

    async def tell(**fields: Any) -> None:
        other = msgspec.structs.replace(own, router="router-9", digest="other", **fields)
        await world.bus.publish(subjects.digests(NAMESPACE, POOL), msgspec.msgpack.encode(other))
        await asyncio.sleep(0.1)

    for fields in ({"release": "0"}, {"log": "another"}, {"since": 7}, {"position": own.position + 1}):
        await tell(**fields)
    for position in range(3 * KEPT_MAX):
        await tell(position=1_000_000 + position)
    await world.bus.publish(subjects.digests(NAMESPACE, POOL), b"no digest")
    await tell(epoch=1)
    assert alarms(router) == [(1, True)], "the last one can be compared"
    assert len(router._divergence._others["router-9"]) == KEPT_MAX
