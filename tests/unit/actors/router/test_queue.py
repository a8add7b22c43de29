"""Waiting at a router on a virtual clock: who waits, in which order they are served, and what is refused."""

import asyncio

import pytest

from headwater.actors.router.queries import HOLD_S, SERVED_PER_TURN, TICK_S
from headwater.router.admission import UNACCEPTED_NS_MAX
from headwater.router.queue import QueueLimits, QueueSettings
from headwater.router.replay import Recorded, Replay
from headwater.router.state import RouterState
from headwater.schemas.routing import Decision, RouteQuery, RouteRefused
from tests.support.worlds.queue import FULL, Asking, Edge, crowded, parked, waiting
from tests.support.worlds.virtual import Stage, events_of, staged, until


@staged
async def test_a_full_fleet_lets_queries_wait_serves_them_in_order_and_refuses_beyond(stage: Stage) -> None:
    """Each gets the worker when the one before has left it; how long it waited is in the log, and replays."""
    edge, first = await crowded(stage)
    asked = {
        name: await parked(stage, edge, name, priority=priority)
        for name, priority in (("a", 0), ("b", 0), ("c", -1))
    }
    beyond = await edge.ask("d")
    assert isinstance(beyond, RouteRefused)
    assert (beyond.status, beyond.final, beyond.code) == (503, True, "overloaded")
    assert beyond.retry_after_s >= 1.0
    await asyncio.sleep(3 * HOLD_S)
    assert not any(asking.done() for asking in asked.values())
    await edge.cancel(first)
    order = []
    while asked:
        await asyncio.wait(list(asked.values()), return_when=asyncio.FIRST_COMPLETED)
        [name] = [name for name, asking in asked.items() if asking.done()]
        made = asked.pop(name).result()
        assert isinstance(made, Decision)
        assert made.waited_ms >= 3_000 * HOLD_S
        order.append(name)
        assert waiting(stage) == len(asked), "one at a time"
        await edge.send(made)
    assert order == ["c", "a", "b"]
    await asyncio.sleep(1.0)
    records = await stage.records()
    decisions = events_of(records, Decision)
    assert [made.request for made in decisions] == ["first", "c", "a", "b"]
    assert [made.waited_ms > 0 for made in decisions] == [False, True, True, True]
    life = next((r.batch.writer, r.batch.epoch) for r in records if Decision in map(type, r.batch.events))
    replay = Replay(RouterState(), [Recorded(life, made) for made in decisions])
    assert replay.start() is None
    assert all(replay.step(one) is None for one in records)
    assert replay.verified == 4


@staged
async def test_a_flood_of_one_tenant_does_not_shut_others_out(stage: Stage) -> None:
    """Beyond its share it is told so (429); another tenant still gets in, and has its turn in between."""
    edge, first = await crowded(stage, QueueLimits(requests=8, tenant_share=0.5))
    flood = [await parked(stage, edge, f"a{number}", tenant="a") for number in range(4)]
    refused = await edge.ask("a4", "a")
    assert isinstance(refused, RouteRefused)
    assert (refused.status, refused.code, refused.final) == (429, "rate_limit_exceeded", True)
    other = await parked(stage, edge, "b0", tenant="b")
    await edge.cancel(first)
    await flood[0]
    await edge.send(flood[0].result())  # type: ignore[arg-type]
    made = await other
    assert isinstance(made, Decision)
    assert [asking.done() for asking in flood] == [True, False, False, False]
    for asking in flood[1:]:
        asking.cancel()


@staged
async def test_a_deadline_that_passes_while_it_waits(stage: Stage) -> None:
    """It is refused then, not served late; one that waits no longer than that has its turn."""
    edge, _ = await crowded(stage)
    began = stage.clock.time()
    asking = await parked(stage, edge, "a", deadline_ms=1_500)
    refused = await asking
    assert isinstance(refused, RouteRefused)
    assert (refused.status, refused.final, refused.code) == (503, True, "deadline_exceeded")
    assert stage.clock.time() - began == pytest.approx(1.5 + TICK_S / 2, abs=TICK_S)
    assert waiting(stage) == 0


@staged
async def test_the_longest_wait_and_then_a_refusal(stage: Stage) -> None:
    """A fleet that stays busy: the client hears it, with when to come again."""
    edge, first = await crowded(stage, QueueLimits(wait_s=3.0))
    assert isinstance(first, Decision)
    refused = await edge.ask("a")
    assert isinstance(refused, RouteRefused)
    assert (refused.status, refused.final) == (503, True)
    assert "3 s" in refused.reason


@staged
async def test_many_that_need_a_busy_worker_keep_no_other_waiting_and_no_router_busy(stage: Stage) -> None:
    """More kinds of them than one turn serves; a free worker takes whoever may have it, at once."""
    edge, first = await crowded(stage, QueueLimits(requests=1_000, tenant_share=1.0))
    other = await stage.engine("w2")
    await until(lambda: "w2" in stage.routers["r1"].state.loads.workers, 1.0)
    no = f"w2.{other.epoch}"
    many = [edge.ask(f"b{number}", exclude=(no, f"x{number}.1")) for number in range(2 * SERVED_PER_TURN)]
    await until(lambda: waiting(stage) == len(many), 1.0)
    made = await edge.ask("c")
    assert isinstance(made, Decision)
    assert (made.worker, made.waited_ms) == ("w2", 0)
    await asyncio.sleep(UNACCEPTED_NS_MAX / 1e9 + 1.0)
    assert waiting(stage) == len(many)
    tries = [0]
    choose = stage.routers["r1"].decisions.choose

    def counted(query: RouteQuery) -> Decision | RouteRefused:
        tries[0] += 1
        return choose(query)

    stage.routers["r1"].decisions.choose = counted  # type: ignore[method-assign]
    await asyncio.sleep(2.0)
    assert tries[0] == 0, "nothing changed that could help any of them"
    assert isinstance(first, Decision)
    for asking in many:
        asking.cancel()


@staged
async def test_who_comes_does_not_overtake_who_waits(stage: Stage) -> None:
    """Also where a worker gets free by time alone, and nobody has looked yet."""
    await stage.engine("w1")
    await stage.router("r1", QueueSettings(FULL, QueueLimits(requests=1_000, tenant_share=1.0)))
    edge = Edge(stage)
    lost = await edge.ask("lost")
    assert isinstance(lost, Decision)
    began = stage.clock.time()
    first = await parked(stage, edge, "a")
    await asyncio.sleep(UNACCEPTED_NS_MAX / 1e9 - 0.2 - (stage.clock.time() - began))
    later: list[Asking] = []
    while not first.done():
        later.append(edge.ask(f"b{len(later)}"))
        await asyncio.sleep(0.01)
    assert stage.clock.time() - began == pytest.approx(UNACCEPTED_NS_MAX / 1e9, abs=TICK_S + 0.1)
    assert not any(asking.done() for asking in later)
    for asking in later:
        asking.cancel()


@staged
async def test_what_does_not_wait_is_decided_however_busy_all_are(stage: Stage) -> None:
    """A request under way that lost its worker, or an edge of a release that can not wait."""
    edge, _ = await crowded(stage)
    asking = await parked(stage, edge, "a")
    assert isinstance(await edge.ask("b", waits=False), Decision)
    assert waiting(stage) == 1
    await stage.engine("w2")
    await asking
    made = await edge.ask("c", waits=False)
    assert isinstance(made, Decision)
    assert not made.constraints.exclude, "both are busy"
    await stage.engine("w3")
    await until(lambda: "w3" in stage.routers["r1"].state.loads.workers, 1.0)
    made = await edge.ask("d", waits=False)
    assert isinstance(made, Decision)
    assert made.worker == "w3", "the only one that is free"
    asking.cancel()


@staged
async def test_without_limits_nobody_waits(stage: Stage) -> None:
    """As it was."""
    await stage.engine("w1")
    router = await stage.router("r1")
    edge = Edge(stage)
    for number in range(200):
        assert isinstance(await edge.ask(f"r{number}"), Decision)
    assert router.stats()["waiting"] == 0
