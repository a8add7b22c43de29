"""Waiting at a router on a virtual clock where edges leave and die, routers stop, messages are lost and the log is gone."""

import asyncio

import pytest

from headwater.actors.edge.saga.placement import ROUTE_TIMEOUT_S
from headwater.actors.edge.saga.workers import UNANSWERED_MAX
from headwater.actors.router.queries import ABANDONED_S, HOLD_S, TICK_S
from headwater.actors.runtime.ports import BusError
from headwater.router.admission import SILENCE_S
from headwater.router.queue import QueueSettings
from headwater.schemas.routing import Decision, DecisionVoided, RouteRefused
from tests.support.worlds.queue import FULL, LIMITS, Edge, crowded, parked, waiting
from tests.support.worlds.virtual import Stage, events_of, staged, until


@pytest.mark.parametrize("how", ["cancelled", "killed"])
@staged
async def test_a_client_that_leaves_gives_up_its_place(stage: Stage, how: str) -> None:
    """At once where its edge lives to say so, else once its edge has not asked for a while."""
    edge, _ = await crowded(stage)
    other = Edge(stage, "other")
    asking = await parked(stage, other, "a")
    began = stage.clock.time()
    if how == "killed":
        await stage.kill("other")
        asking.cancel()
    else:
        asking.cancel()
    took_s = await until(lambda: waiting(stage) == 0)
    assert took_s <= (ABANDONED_S + TICK_S if how == "killed" else HOLD_S + TICK_S)
    assert how == "killed" or stage.clock.time() - began < 2 * HOLD_S
    assert isinstance(edge, Edge)


@staged
async def test_a_decision_for_somebody_who_has_left_is_voided(stage: Stage) -> None:
    """Its answer was on the way when the client left: the next one does not wait for a request that never comes."""
    edge, first = await crowded(stage)
    gone = await parked(stage, edge, "gone")
    stays = await parked(stage, edge, "stays")
    await edge.cancel(first)
    while waiting(stage) == 2:
        # Shorter than any message takes.
        await asyncio.sleep(0.00005)
    assert not gone.done(), "the answer is on its way"
    gone.cancel()
    made = await stays
    assert isinstance(made, Decision)
    voided = events_of(await stage.records(), DecisionVoided)
    assert [one.request for one in voided] == ["gone"]


@staged
async def test_a_router_that_dies_with_queries_is_left_for_another(stage: Stage) -> None:
    """Its edge hears within its usual time limit, and asks again where another answers."""
    edge, _ = await crowded(stage)
    asking = await parked(stage, edge, "a")
    began = stage.clock.time()
    await stage.kill("r1")
    with pytest.raises(BusError):
        await asking
    assert stage.clock.time() - began < UNANSWERED_MAX * ROUTE_TIMEOUT_S + 0.1
    await stage.router("r2", QueueSettings(FULL, LIMITS))
    again = edge.ask("a-2")
    await until(lambda: waiting(stage, "r2") == 1, 1.0)
    again.cancel()


@staged
async def test_a_router_that_stops_sends_those_who_wait_to_another(stage: Stage) -> None:
    """At once, and not as a refusal that a client should hear."""
    edge, _ = await crowded(stage)
    asking = await parked(stage, edge, "a")
    began = stage.clock.time()
    stage.routers["r1"].stop()
    refused = await asking
    assert isinstance(refused, RouteRefused)
    assert (refused.final, refused.retry_after_s) == (False, 1.0)
    assert stage.clock.time() - began < 0.1


@staged
async def test_lost_questions_and_answers_do_not_lose_the_place(stage: Stage) -> None:
    """With one message in ten lost the query is decided, once."""
    edge, first = await crowded(stage)
    asking = await parked(stage, edge, "a")
    stage.fleet.network.drop = 0.1
    await asyncio.sleep(20 * HOLD_S)
    assert waiting(stage) == 1
    stage.fleet.network.drop = 0.0
    await edge.cancel(first)
    assert isinstance(await asking, Decision)
    made = [one.request for one in events_of(await stage.records(), Decision)]
    await asyncio.sleep(0.5)
    made = [one.request for one in events_of(await stage.records(), Decision)]
    assert made == ["first", "a"]


@staged
async def test_with_the_log_gone_nobody_waits(stage: Stage) -> None:
    """Nobody could be seen to get free: what waits is decided as the fold stands, and so is what comes."""
    edge, _ = await crowded(stage)
    asking = await parked(stage, edge, "a")
    stage.fleet.store.full = 1
    began = stage.clock.time()
    assert isinstance(await asking, Decision)
    assert stage.clock.time() - began == pytest.approx(SILENCE_S, abs=2 * TICK_S)
    assert isinstance(await edge.ask("b"), Decision)
    stage.fleet.store.full = 0
    await asyncio.sleep(2.0)
    (await parked(stage, edge, "c")).cancel()


@staged
async def test_a_batch_request_that_makes_room_is_told_at_once(stage: Stage) -> None:
    """Its edge hears before it would have asked again for long; the urgent one waits in its place."""
    edge, _ = await crowded(stage)
    batch = [await parked(stage, edge, f"batch-{number}", priority=10) for number in range(3)]
    urgent = edge.ask("urgent", priority=-10)
    await until(batch[-1].done, HOLD_S)
    told = batch[-1].result()
    assert isinstance(told, RouteRefused)
    assert (told.status, told.code) == (503, "overloaded")
    assert waiting(stage) == 3
    assert not urgent.done()
    for asking in (*batch[:2], urgent):
        assert not asking.done()
        asking.cancel()
