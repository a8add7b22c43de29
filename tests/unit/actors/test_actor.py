"""The shadow: every decision made again on the very state it was made on, judged once, also over restarts."""

import asyncio
from collections import Counter

import msgspec
import pytest

from headwater.actors.runtime.ports import Message
from headwater.actors.shadow import HOLD_S, ShadowActor
from headwater.events.ports import Record
from headwater.ops.sim.fleet import NAMESPACE, POOL
from headwater.router.decide import Evaluation, reevaluate, with_policy
from headwater.router.index.prefix_index import PrefixIndex
from headwater.router.load import Loads
from headwater.router.replay import ShadowFold
from headwater.router.state import RouterState
from headwater.schemas import subjects
from headwater.schemas.events import BlocksStored, LoadReported
from headwater.schemas.hashing import pack_tokens
from headwater.schemas.inference import GenerateRequest, Sampling
from headwater.schemas.routing import Decision, RouteQuery, RouteRefused, Shadowed
from tests.support.data.examples import joined, packed, record
from tests.support.data.story import decided, fold, story
from tests.support.worlds.clock import WALL_NS
from tests.support.worlds.virtual import Stage, events_of, staged, until
from tests.unit.actors.router.test_actor import asked


def worst(index: PrefixIndex, loads: Loads, cold: set[str], decision: Decision) -> Evaluation | RouteRefused:
    """A policy that takes the dearest worker; any other name is the real one."""
    again = reevaluate(index, loads, cold, with_policy(decision, "kv"))
    if decision.preferences.policy != "worst" or isinstance(again, RouteRefused):
        return again
    dearest = max(again.candidates, key=lambda candidate: candidate.score)
    made = msgspec.structs.replace(again.decision, worker=dearest.worker, leg=dearest.leg)
    return again._replace(decision=made)


def through(shadow: ShadowFold, records: list[Record], ahead: int = 5) -> list[Shadowed]:
    """Every record, read so many records before it is folded."""
    found: list[Shadowed] = []
    for at, one in enumerate(records):
        shadow.read(one)
        if at >= ahead:
            found += shadow.advance(records[at - ahead])
    for one in records[-ahead:]:
        found += shadow.advance(one)
    return found + shadow.judge()


def three() -> tuple[RouterState, list[Record]]:
    """w1 has three blocks of a prompt, w2 one, w3 none."""
    records = [record(at + 1, joined(f"w{at + 1}"), writer=f"w{at + 1}") for at in range(3)]
    records.append(record(4, BlocksStored(0, packed(1, 2, 3)), writer="w1"))
    records.append(record(5, BlocksStored(0, packed(1)), writer="w2"))
    return fold(records), records


def made(state: RouterState, number: int, *names: int) -> Decision:
    """A router's decision on a state."""
    decision = decided(
        state, RouteQuery(f"r{number}-0-1", len(names) * 16, 5, packed(*names)), number, WALL_NS
    )
    assert decision is not None
    return decision


def test_the_same_policy_agrees_with_every_decision_of_a_log() -> None:
    """On any story: the state on which it decides is the router's."""
    judged = 0
    for number in range(8):
        records = story(number, 60, wild=False)
        decisions = events_of(records, Decision)
        shadow = ShadowFold(RouterState(), "kv", "kv")
        found = through(shadow, records)
        tally = shadow.tally
        assert (tally.late, tally.unjudged, tally.judged) == (0, 0, len(decisions))
        assert tally.agreed == tally.judged
        assert [one.request for one in found] == [one.request for one in decisions]
        for one, decision in zip(found, decisions, strict=True):
            assert (one.worker, one.chosen) == (decision.worker, decision.worker)
            assert one.score == one.chosen_score == decision.chosen.score
        judged += tally.judged
    assert judged > 50


def test_another_policy_is_judged_by_the_judge() -> None:
    """Its regret is what its choice costs above the least; the router, which is the judge here, has none."""
    state, records = three()
    decision = made(state, 1, 1, 2, 3, 4)
    records.append(record(6, decision, writer="router"))
    shadow = ShadowFold(RouterState(), "worst", "kv", reevaluate=worst)
    [one] = through(shadow, records)
    scores = {candidate.worker: candidate.score for candidate in decision.candidates}
    assert (one.chosen, one.worker) == ("w1", "w3")
    assert (one.score, one.chosen_score, one.least) == (scores["w3"], scores["w1"], scores["w1"])
    assert shadow.tally.agreed == 0
    assert (shadow.tally.regret_chosen, shadow.tally.regret_shadow) == (0.0, scores["w3"] - scores["w1"])


def test_decisions_count_before_the_log_has_them() -> None:
    """A router's second decision stands on its first one, though the log told neither when it was made."""
    state, records = three()
    first = made(state, 1, 9, 8, 7)
    state.loads.decide(first)
    second = msgspec.structs.replace(made(state, 2, 9, 8, 7), seen=0)
    assert second.worker != first.worker, "the first one is in the way"
    records += [record(6, first, writer="router"), record(7, joined("w4"), writer="w4")]
    records.append(record(8, second, writer="router"))
    shadow = ShadowFold(RouterState(), "kv", "kv")
    assert [one.worker for one in through(shadow, records)] == [first.worker, second.worker]
    assert (shadow.tally.agreed, shadow.tally.unjudged) == (2, 0)


def test_a_decision_that_comes_too_late_is_counted_and_costs_no_other() -> None:
    """Its position is folded already; those behind it are judged."""
    state, records = three()
    first = made(state, 1, 1, 2)
    shadow = ShadowFold(RouterState(), "kv", "kv")
    through(shadow, [*records, record(6, joined("w4"), writer="w4")])
    shadow.read(record(7, first, writer="router"))
    assert shadow.tally.late == 1
    shadow.advance(record(7, first, writer="router"))
    second = made(shadow.state, 2, 1, 2)
    shadow.read(record(8, second, writer="router"))
    assert [one.request for one in shadow.judge()] == ["r2-0-1"]
    assert (shadow.tally.judged, shadow.tally.unjudged) == (1, 0)


def test_what_was_judged_before_is_not_judged_again() -> None:
    """But it counts for what comes behind it."""
    state, records = three()
    first = made(state, 1, 1, 2)
    state.loads.decide(first)
    second = made(state, 2, 1, 2)
    records += [record(6, first, writer="router"), record(7, second, writer="router")]
    shadow = ShadowFold(RouterState(), "kv", "kv", done=["r1-0-1"])
    assert [one.request for one in through(shadow, records)] == ["r2-0-1"]
    assert shadow.tally.agreed == 1


def test_estimates_are_compared_with_measurements() -> None:
    """Cached tokens, never the whole prompt; and the time, where the router had an estimate."""
    state, records = three()
    decision = made(state, 1, 1, 2, 3)
    timed = msgspec.structs.replace(
        decision,
        candidates=tuple(
            msgspec.structs.replace(one, queue_ms=5.0, prefill_ms=20.0) for one in decision.candidates
        ),
    )
    silent = msgspec.structs.replace(made(state, 2, 9), position=7, seen=1)
    load = (1, 0, 0, 1000)
    report = LoadReported(*load, (), ("r1-0-1", "r2-0-1"), (), (16, -1))
    records += [
        record(6, timed, writer="router"),
        record(7, joined("w4"), writer="w4"),
        record(8, silent, writer="router"),
        record(9, report, writer="w1")._replace(stored_ns=WALL_NS + 40_000_000),
    ]
    shadow = ShadowFold(RouterState(), "kv", "kv")
    through(shadow, records)
    cached, first = shadow.tally.cached_tokens, shadow.tally.first_token_s
    # Two blocks: of the third, the last token is always computed.
    assert (cached.count, cached.estimated, cached.measured, cached.absolute_error) == (1, 32, 16, 16)
    assert (first.count, first.estimated, first.measured) == (1, 0.025, 0.04)


async def busy(stage: Stage, numbers: range) -> None:
    """Requests as edges send them: asked for, and given to the worker that was chosen."""
    for number in numbers:
        decision = await asked(stage, f"r{number}-0-1")
        worker = stage.workers[decision.worker]
        request = GenerateRequest(
            decision.request, "e1", number, pack_tokens([number % 3] * 64), Sampling(8, ignore_eos=True)
        )
        await worker.intake.on_generate(Message("", msgspec.msgpack.encode(request), "_INBOX.nobody"))
        if number % 3:
            await asyncio.sleep(0.03)


async def shadowed(stage: Stage, policy: str, name: str = "shadow-a") -> ShadowActor:
    """A shadow that runs."""
    process, world = stage.world(name)
    actor = ShadowActor(world, name, POOL, policy=policy)
    process.start(actor.run(), "actor")
    await until(actor.ready.is_set, within_s=20.0)
    return actor


@staged
async def test_a_shadow_judges_live_and_only_once_over_restarts(stage: Stage) -> None:
    """Two routers; the shadow is killed twice, at any moment, and begins again where the log ends."""
    for name in ("w1", "w2"):
        await stage.engine(name)
    for name in ("router-0", "router-1"):
        await stage.router(name)
    actor = await shadowed(stage, "kv")
    for part in range(3):
        await busy(stage, range(part * 40, part * 40 + 40))
        if part < 2:
            await asyncio.sleep(HOLD_S - 0.4 * part)
            await stage.kill("shadow-a")
            actor = await shadowed(stage, "kv")
    await asyncio.sleep(HOLD_S + 1.0)
    records = await stage.records()
    decisions = events_of(records, Decision)
    found = events_of(records, Shadowed)
    assert len(decisions) == 120
    assert Counter(one.request for one in found) == Counter(one.request for one in decisions)
    assert len({record.batch.writer for record in records if events_of([record], Decision)}) == 2
    assert {one.worker == one.chosen for one in found} == {True}
    stats = actor.stats()
    assert (stats["late"], stats["unjudged"], stats["agreement"]) == (0, 0, 1.0)
    assert 40 <= stats["judged"] < 120
    own = {record.subject for record in records if events_of([record], Shadowed)}
    assert own == {subjects.pool_subject(NAMESPACE, POOL, "shadow", "shadow-a")}
    state = RouterState()
    for one in records:
        assert state.apply(one) is None
    assert state.digest() == stage.routers["router-0"].state.digest(), "routers pass over it"
    actor.stop()
    await asyncio.sleep(1.0)
    assert await stage.fleet.store.leases.get(subjects.lease_key("shadow", "shadow-a")) is None


@pytest.mark.parametrize("lost", ["purged", "replaced"])
@staged
async def test_a_shadow_goes_on_behind_a_gap(stage: Stage, lost: str) -> None:
    """A part of the log is lost, or all of it: from nothing behind it, and decisions are judged again."""
    await stage.engine("w1")
    router = await stage.router("router-0")
    actor = await shadowed(stage, "kv")
    await busy(stage, range(20))
    await asyncio.sleep(HOLD_S + 1.0)
    assert actor.stats()["judged"] == 20
    if lost == "purged":
        stage.fleet.processes["shadow-a"].slow_reader_s = 5.0
        await busy(stage, range(20, 40))
        await asyncio.sleep(1.0)
        await router._snapshots.save(router._log)
        assert router._snapshots._saved_position
        stage.pool.purge(router._snapshots._saved_position)
        stage.fleet.processes["shadow-a"].slow_reader_s = 0.0
    else:
        stage.pool.replace()
    # From the router's snapshot, or the workers announce themselves anew to the router, and the shadow hears it.
    await asyncio.sleep(20.0)
    before = actor.stats()["judged"]
    await busy(stage, range(40, 60))
    await asyncio.sleep(HOLD_S + 1.0)
    assert actor.stats()["judged"] >= before + 20
