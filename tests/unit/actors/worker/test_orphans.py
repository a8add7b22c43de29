"""Requests of every kind whose edge is gone are aborted; those whose edge is there, slow or reconnecting are not."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import msgspec
import pytest
import pytest_asyncio

from headwater.actors.runtime.ports import Message, Subscription
from headwater.actors.worker import handoffs
from headwater.actors.worker.handoffs import (
    CHECK_PERIOD_S,
    GONE_S,
    Edge,
    OrphanWatch,
    RequestsByEdge,
    by_edge,
)
from headwater.actors.worker.token_frames import FrameSender
from headwater.engines.engine import Step
from headwater.schemas import subjects
from headwater.schemas.inference import GenerateRequest, Sampling, StreamsQuery, StreamsReply, WaitingEdge
from tests.support.worlds.clock import ManualClock, running
from tests.support.worlds.memory import memory_world

SOON_S = CHECK_PERIOD_S
GONE_WITHIN_S = GONE_S + 2 * CHECK_PERIOD_S


class Streams:
    """Requests that generate, and those of them that were aborted."""

    def __init__(self, frames: FrameSender) -> None:
        self._frames = frames
        self.aborted: list[str] = []

    def requests_by_edge(self) -> RequestsByEdge:
        """See `EdgeRequests`."""
        return self._frames.streams_by_edge()

    def abort(self, requests: Sequence[str]) -> None:
        """See `EdgeRequests`."""
        self.aborted += requests


class Answers:
    """Requests that are answered as a whole. An aborted one ends at once."""

    def __init__(self) -> None:
        self.waiters: dict[str, WaitingEdge | None] = {}
        self.aborted: list[str] = []

    def requests_by_edge(self) -> RequestsByEdge:
        """See `EdgeRequests`."""
        return by_edge(self.waiters.items())

    def abort(self, requests: Sequence[str]) -> None:
        """See `EdgeRequests`."""
        self.aborted += requests
        for request in requests:
            del self.waiters[request]


class Kept:
    """KV of prompts, by edge: for how many requests."""

    def __init__(self) -> None:
        self.requests: dict[Edge, int] = {}

    def edges_of_kept_kv(self) -> list[Edge]:
        """See `KeptKv`."""
        return list(self.requests)

    def release_kept_kv(self, edge: Edge) -> int:
        """See `KeptKv`."""
        return self.requests.pop(edge, 0)


class Worker:
    """Requests of a worker, and what its watch aborts."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.world = memory_world(self.clock)
        self.frames = FrameSender(self.world.bus, self.world.ns, "w")
        self.streams, self.answers = Streams(self.frames), Answers()
        self.kept = Kept()
        self.watch = OrphanWatch(self.world, (self.streams, self.answers), self.kept)
        self.asked: list[tuple[int, ...]] = []

    @property
    def aborted(self) -> list[str]:
        """Of the requests that generate."""
        return self.streams.aborted

    def generate(self, request: str, handle: int, epoch: int = 7) -> None:
        """A request of the edge `e`."""
        self.frames.open_stream(GenerateRequest(request, "e", handle, b"", Sampling(4), edge_epoch=epoch))

    async def edge(self, has: set[int], *, epoch: int = 7, answers: bool = True) -> Subscription:
        """An incarnation of the edge `e`, which has these streams."""

        async def on_query(message: Message) -> None:
            self.asked.append(msgspec.msgpack.decode(message.data, type=StreamsQuery).handles)
            if answers:
                ended = StreamsReply(tuple(one for one in self.asked[-1] if one not in has))
                await self.world.bus.publish(message.reply, msgspec.msgpack.encode(ended))

        return await self.world.bus.subscribe(subjects.edge_streams("ns", "e", epoch), on_query)


@pytest_asyncio.fixture
async def worker() -> AsyncIterator[Worker]:
    """With a watch that runs."""
    made = Worker()
    async with running(made.watch.run()):
        yield made


async def test_requests_of_a_dead_edge_are_aborted_once(worker: Worker) -> None:
    """All of that incarnation's, and no earlier than a server takes to be there again."""
    worker.generate("r", 1)
    worker.generate("s", 2)
    worker.generate("other", 1, epoch=8)
    await worker.edge({1}, epoch=8)
    await worker.clock.advance(GONE_S)
    assert worker.aborted == []
    await worker.clock.advance(2 * CHECK_PERIOD_S)
    assert sorted(worker.aborted) == ["r", "s"]
    await worker.clock.advance(10 * CHECK_PERIOD_S)
    assert len(worker.aborted) == 2


async def test_an_edge_that_is_back_in_time_keeps_its_requests(worker: Worker) -> None:
    """Each time it is away counts by itself."""
    worker.generate("r", 1)
    for _ in range(3):
        await worker.clock.advance(GONE_S)
        edge = await worker.edge({1})
        await worker.clock.advance(SOON_S)
        await edge.unsubscribe()
    assert worker.aborted == []


async def test_a_lost_cancellation_is_made_up_for(worker: Worker) -> None:
    """An edge that is there says which requests have ended."""
    worker.generate("kept", 1)
    worker.generate("ended", 2)
    await worker.edge({1})
    await worker.clock.advance(SOON_S)
    assert worker.aborted == ["ended"]


async def test_a_slow_edge_is_no_dead_one(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked again, until nobody listens for it."""
    monkeypatch.setattr(handoffs, "REPLY_S_MAX", 0.001)
    worker.generate("r", 1)
    edge = await worker.edge(set(), answers=False)
    async with asyncio.timeout(10):
        while len(worker.asked) < 10:
            await worker.clock.advance(SOON_S)
            await asyncio.sleep(0.002)
        assert worker.aborted == []
        await edge.unsubscribe()
        while worker.aborted != ["r"]:
            await worker.clock.advance(SOON_S)
            await asyncio.sleep(0.002)


async def test_each_kind_aborts_its_own(worker: Worker) -> None:
    """An edge is asked once about all of them; what it waits for continues, and what answers for no edge too."""
    worker.generate("stream", 1)
    worker.generate("left", 2)
    worker.answers.waiters = {
        "vectors": WaitingEdge("e", 7, 3),
        "forgotten": WaitingEdge("e", 7, 4),
        "of an edge without a lease": WaitingEdge("e", 0, 5),
        "of an earlier release": None,
    }
    edge = await worker.edge({1, 3})
    await worker.clock.advance(SOON_S)
    assert worker.asked == [(1, 2, 3, 4)]
    assert (worker.streams.aborted, worker.answers.aborted) == (["left"], ["forgotten"])
    await edge.unsubscribe()
    await worker.clock.advance(GONE_WITHIN_S)
    assert (worker.streams.aborted, worker.answers.aborted) == (["left", "stream"], ["forgotten", "vectors"])
    assert len(worker.answers.waiters) == 2


async def test_kv_is_kept_for_an_edge_that_lives_and_released_when_it_is_gone(worker: Worker) -> None:
    """Also where the edge has no other request here, and not before it is surely gone."""
    worker.kept.requests = {("e", 7): 2, ("e", 8): 1}
    await worker.edge(set(), epoch=8)
    await worker.clock.advance(GONE_S)
    assert worker.kept.requests == {("e", 7): 2, ("e", 8): 1}
    await worker.clock.advance(2 * CHECK_PERIOD_S)
    assert worker.kept.requests == {("e", 8): 1}
    await worker.clock.advance(10 * CHECK_PERIOD_S)
    assert worker.kept.requests == {("e", 8): 1}


async def test_only_streams_that_are_open_count(worker: Worker) -> None:
    """Those that have ended are not asked about, nor those of an edge of a release that answers nothing."""
    worker.generate("old", 1, epoch=0)
    worker.generate("ended", 2)
    worker.frames.send_step("ended", Step((), "stop"))
    await worker.clock.advance(GONE_WITHIN_S)
    assert worker.aborted == []
