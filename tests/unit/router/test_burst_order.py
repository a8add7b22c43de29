"""Queries that come together: who is decided first, and what that is good for."""

import asyncio
import math
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from headwater.actors.router.queries import BurstBatcher
from headwater.actors.runtime.ports import Message
from headwater.router.queue import BURST_MAX, Preview, order_by_regret, regret
from headwater.schemas.routing import Candidate, Decision, RouteQuery, RouteRefused, RouteReply
from tests.support.data.queries import changed
from tests.unit.ops.operator.test_explain import DECISION


def decision(*scores: float, policy: str = "kv") -> Decision:
    """One with candidates of these costs."""
    candidates = tuple(Candidate(f"w{at}", 1, 0, 0, 0, 0, 0, score) for at, score in enumerate(scores))
    return changed(DECISION, candidates=candidates, worker="w0", policy=policy)


def query(name: str) -> RouteQuery:
    """One of this name."""
    return RouteQuery(name, 16, 5, b"")


def test_whoever_would_lose_most_is_first() -> None:
    """By how much dearer the second best worker is; who has only one comes before all, equals in their order."""
    seen = {
        "alike": decision(10, 10, 10),
        "little": decision(90, 10, 12),
        "much": decision(10, 200, 300),
        "only": decision(10),
        "refused": RouteRefused("nobody"),
        "again": None,
    }
    names = ["alike", "again", "little", "only", "refused", "much"]
    order = order_by_regret([query(name) for name in names], lambda one: seen[one.request])
    assert [names[place] for place in order] == ["only", "much", "little", "alike", "again", "refused"]
    assert regret(decision(5)) == math.inf
    assert regret(decision(5, 50, policy="random")) == 0.0


def test_one_query_costs_no_look_and_very_many_are_not_all_looked_at() -> None:
    """The rest keep their places behind."""
    looked: list[str] = []

    def look(one: RouteQuery) -> None:
        looked.append(one.request)

    assert order_by_regret([query("a")], look) == [0]
    assert looked == []
    order = order_by_regret([query(f"{number}") for number in range(100)], look)
    assert order == list(range(100))
    assert len(looked) == BURST_MAX


class Handler:
    """Previews, decides and answers by three functions."""

    def __init__(
        self,
        preview: Preview,
        answer: Callable[[Message, RouteQuery], Awaitable[None]],
        decide: Callable[[RouteQuery], RouteReply] = lambda _: RouteRefused("none"),
    ) -> None:
        self._preview = preview
        self._answer = answer
        self._decide = decide

    def preview(self, query: RouteQuery) -> Decision | RouteRefused | None:
        return self._preview(query)

    async def decide(self, query: RouteQuery) -> RouteReply:
        return self._decide(query)

    async def send(self, message: Message, query: RouteQuery, reply: RouteReply) -> None:
        await self._answer(message, query)


async def test_a_router_that_does_not_keep_up_does_not_look() -> None:
    """Looking costs as much again: it would fall behind for good."""
    looked = 0
    left = list(range(12))

    def look(one: RouteQuery) -> Decision:
        nonlocal looked
        looked += 1
        return decision(0, 1)

    async def answer(message: Message, one: RouteQuery) -> None:
        if left:
            # Two more come for each that is answered.
            for _ in range(2):
                batcher.enqueue(Message("s", b"", "r"), query(f"{left.pop()}"))

    batcher = BurstBatcher(Handler(look, answer))
    task = asyncio.create_task(batcher.run())
    for name in ("a", "b"):
        batcher.enqueue(Message("s", b"", "r"), query(name))
    async with asyncio.timeout(10):
        await batcher.wait_drained()
    assert left == []
    assert looked == 2 + 4
    looked = 0
    for name in ("c", "d"):
        batcher.enqueue(Message("s", b"", "r"), query(name))
    async with asyncio.timeout(10):
        await batcher.wait_drained()
    assert looked == 2
    task.cancel()


@pytest.mark.parametrize("count", [1, 5, 150])
async def test_a_burst_is_answered_whole_and_in_that_order(count: int) -> None:
    """What comes in one turn is decided together; `wait_drained` waits for all of it."""
    answered: list[str] = []

    def look(one: RouteQuery) -> Decision:
        return decision(0, float(one.request))

    async def answer(message: Message, one: RouteQuery) -> None:
        await asyncio.sleep(0)
        answered.append(one.request)

    batcher = BurstBatcher(Handler(look, answer))
    task = asyncio.create_task(batcher.run())
    names = [str((7 * number) % count) for number in range(count)]
    for name in names:
        batcher.enqueue(Message("s", b"", "r"), query(name))
    async with asyncio.timeout(10):
        await batcher.wait_drained()
    task.cancel()
    assert sorted(answered) == sorted(names)
    first = answered[:BURST_MAX]
    assert first == sorted(first, key=float, reverse=True)


@pytest.mark.parametrize(
    ("policy", "answered"),
    [
        ("kv", ["refused", "short", "middle", "long"]),
        ("least_loaded", ["long", "short", "refused", "middle"]),
    ],
)
async def test_a_burst_is_answered_shortest_prompt_first(policy: str, answered: list[str]) -> None:
    """All of it is decided before, in order of regret, and a refusal is sent at once; policies that ignore cost keep the order of arrival."""
    regrets = {"long": 9.0, "short": 1.0, "refused": 5.0, "middle": 2.0}
    prompt_ms = {"long": 300.0, "short": 20.0, "middle": 80.0}
    happened: list[str] = []

    def decide(one: RouteQuery) -> RouteReply:
        happened.append(f"decided {one.request}")
        if one.request not in prompt_ms:
            return RouteRefused("none")
        made = decision(0, regrets[one.request], policy=policy)
        timed = msgspec.structs.replace(made.candidates[0], prefill_ms=prompt_ms[one.request])
        return msgspec.structs.replace(
            made, worker=timed.worker, epoch=timed.epoch, candidates=(timed, *made.candidates[1:])
        )

    async def answer(message: Message, one: RouteQuery) -> None:
        happened.append(one.request)

    batcher = BurstBatcher(
        Handler(lambda one: decision(0, regrets[one.request], policy=policy), answer, decide)
    )
    task = asyncio.create_task(batcher.run())
    for name in regrets:
        batcher.enqueue(Message("s", b"", "r"), query(name))
    async with asyncio.timeout(10):
        await batcher.wait_drained()
    task.cancel()
    decided = ["long", "refused", "middle", "short"] if policy == "kv" else list(regrets)
    assert happened == [*(f"decided {name}" for name in decided), *answered]
