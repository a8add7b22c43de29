"""The edge's ledger over its lives: whatever was accepted is ended exactly once, however a life before this one died."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from headwater.actors.edge.saga.record import ACCEPT_PENDING_MAX, NONE_OPEN, OpenRequests
from headwater.actors.runtime.ports import Ports
from headwater.events.memory import MemoryLog
from headwater.events.ports import Entry, Log, Newest, Record
from headwater.events.writer import PENDING_EVENTS_MAX, WriterFenced
from headwater.ops.sim.checks import fences, messages, terminal_events
from headwater.schemas.clock import Clock
from headwater.schemas.encoding import seal
from headwater.schemas.events import KvGap, RequestAccepted, RequestCheckpoint, RequestEnded, RequestsOpen
from headwater.schemas.subjects import request_subject
from tests.sim.crash import Scene, every_crash
from tests.support.data.examples import batch
from tests.support.worlds.clock import SkippingClock, running, settle
from tests.support.worlds.virtual import events_of

NS = "ns"
SUBJECT = request_subject(NS, "e1")


def ledger(log: Log, epoch: int, clock: Clock) -> OpenRequests:
    """The account of one life of edge e1."""
    return OpenRequests(log, NS, "e1", epoch, clock)


def accepted(request: str) -> RequestAccepted:
    """A request is taken."""
    return RequestAccepted(request, "m", "chat", 10, 100, True)


def ended(request: str, reason: str = "stop") -> RequestEnded:
    """It ends."""
    return RequestEnded(request, reason, 5, 0, 0, 1.0, 2.0)


async def records(log: MemoryLog) -> list[Record]:
    """All that can be read."""
    return [one for one in await messages(log) if isinstance(one, Record)]


async def ends(log: MemoryLog) -> dict[str, list[tuple[str, int]]]:
    """For each request its ends: the reason, and the tokens that it got."""
    found: dict[str, list[tuple[str, int]]] = {}
    for event in events_of(await records(log), RequestEnded):
        found.setdefault(event.request, []).append((event.reason, event.completion_tokens))
    return found


async def live(log: Log, epoch: int, clock: Clock, work: Callable[[OpenRequests], Awaitable[None]]) -> int:
    """One life: it ends what was left, does `work` and is then gone; returns how many were left."""
    one = ledger(log, epoch, clock)
    left = await one.open()
    async with running(one.writer.run()):
        await work(one)
        await one.writer.flush()
    return left


async def nothing(_: OpenRequests) -> None:
    """A life without requests."""


async def test_marks_tell_how_far_back_open_requests_lie() -> None:
    """Behind the position that a message names is everything accepted and not ended at that moment; -1: nothing."""
    clock = SkippingClock()
    log = MemoryLog(clock)

    async def work(one: OpenRequests) -> None:
        for event in (
            accepted("a"),
            accepted("b"),
            ended("a"),
            RequestCheckpoint("b", 0, 64),
            ended("b"),
            accepted("c"),
        ):
            one.write(event)
            await one.writer.flush()

    await live(log, 1, clock, work)
    found = await records(log)
    marks = [events_of([record], RequestsOpen) for record in found]
    assert all(len(mark) == 1 for mark in marks)
    assert [mark[0].since for mark in marks] == [0, 1, 1, 2, 2, NONE_OPEN, 6]
    assert found[0].batch.events[:-1] == ()


async def test_a_later_life_ends_what_an_earlier_one_left() -> None:
    """With an error and the tokens it is known to have got; what had ended stays as it was."""
    clock = SkippingClock()
    log = MemoryLog(clock)

    async def work(one: OpenRequests) -> None:
        for event in (accepted("a"), accepted("b"), ended("a"), RequestCheckpoint("b", 0, 64), accepted("c")):
            one.write(event)
        one.write(RequestCheckpoint("b", 0, 128))

    assert await live(log, 1, clock, work) == 0
    assert await live(log, 2, clock, nothing) == 2
    assert await ends(log) == {"a": [("stop", 5)], "b": [("error", 128)], "c": [("error", 0)]}
    [told, _] = [one for one in events_of(await records(log), RequestEnded) if one.reason == "error"]
    assert told.error == "the edge that served it died"


async def test_the_life_after_that_repeats_no_end() -> None:
    """Nor does any further one, and each reads only what it must."""
    clock = SkippingClock()
    log = MemoryLog(clock)

    async def work(one: OpenRequests) -> None:
        one.write(accepted("a"))

    await live(log, 1, clock, work)
    assert [await live(log, epoch, clock, nothing) for epoch in (2, 3, 4)] == [1, 0, 0]
    assert await ends(log) == {"a": [("error", 0)]}
    assert events_of((await records(log))[-1:], RequestsOpen)[0].since <= 6


@pytest.mark.parametrize("before", [0, 1, 3], ids=["first life", "one request", "three"])
async def test_what_is_accepted_after_the_newest_message_was_looked_at_is_ended(before: int) -> None:
    """The life before goes on writing until it is fenced: between the look and the fence."""
    clock = SkippingClock()

    class Overtaken(MemoryLog):
        """Lets the earlier life write between two calls of the later one."""

        between: Callable[[], Awaitable[None]] | None = None

        async def newest(self, subject: str) -> Newest:
            """See `Log.newest`."""
            found = await super().newest(subject)
            if self.between is not None:
                work, self.between = self.between, None
                await work()
            return found

    log = Overtaken(clock)
    old = ledger(log, 1, clock)
    if before:
        await old.open()
    async with running(old.writer.run()) as writing:
        for number in range(before):
            old.write(accepted(f"before-{number}"))
            await old.writer.flush()
            if number:
                old.write(ended(f"before-{number}"))
                await old.writer.flush()

        async def between() -> None:
            for number in range(3):
                old.write(accepted(f"late-{number}"))
                await old.writer.flush()

        log.between = between
        new = ledger(log, 2, clock)
        assert await new.open() == 3 + (before > 0)
        old.write(accepted("too late"))
        await settle()
        with pytest.raises(WriterFenced):
            await writing
    async with running(new.writer.run()):
        await new.writer.flush()
    assert list(terminal_events(await messages(log))) == []
    assert "too late" not in {event.request for event in events_of(await records(log), RequestAccepted)}


async def test_an_unreadable_mark_is_no_reason_to_forget_anybody() -> None:
    """The newest message was altered: how far back open requests lie is not known, so all is looked at."""
    clock = SkippingClock()
    log = MemoryLog(clock)

    async def work(one: OpenRequests) -> None:
        for event in (accepted("a"), accepted("b"), ended("b"), RequestCheckpoint("a", 0, 64)):
            one.write(event)
            await one.writer.flush()

    await live(log, 1, clock, work)
    last = (await log.bounds()).last
    log.alter(last, b"\0" + log.raw(last).data[1:])
    assert await live(log, 2, clock, nothing) == 1
    assert await ends(log) == {"a": [("error", 0)], "b": [("stop", 5)]}


async def test_requests_of_other_edges_are_not_ended() -> None:
    """They share the stream, not the account."""
    clock = SkippingClock()
    log = MemoryLog(clock)
    other = Entry(request_subject(NS, "e2"), seal(batch(accepted("theirs"), writer="e2")))
    await log.append(other)

    async def work(one: OpenRequests) -> None:
        one.write(accepted("a"))
        await one.writer.flush()
        await log.append(Entry(other.subject, seal(batch(accepted("theirs too"), writer="e2", seq=2))))

    await live(log, 1, clock, work)
    await live(log, 2, clock, nothing)
    assert await ends(log) == {"a": [("error", 0)]}


async def test_nothing_is_taken_that_could_not_be_ended() -> None:
    """A quarter of the queue is kept for the ends of what runs."""
    clock = SkippingClock()
    one = ledger(MemoryLog(clock), 1, clock)
    for number in range(ACCEPT_PENDING_MAX):
        assert one.takes_requests
        one.write(KvGap(number))
    assert not one.takes_requests
    for number in range(PENDING_EVENTS_MAX - ACCEPT_PENDING_MAX):
        one.write(ended(f"r{number}"))
    assert one.writer.refused == 0


def test_every_request_ends_once_wherever_a_life_dies() -> None:
    """One run for each step at which the first or the second life can be killed; then two more lives."""
    left: set[int] = set()

    async def one_life(world: Ports, epoch: int) -> None:
        one = ledger(world.requests, epoch, world.clock)
        left.add(await one.open())
        writing = asyncio.ensure_future(one.writer.run())
        for number in range(3):
            name = f"{epoch}-{number}"
            one.write(accepted(name))
            await world.clock.sleep(0.004)
            one.write(RequestCheckpoint(name, 0, 64))
            if number != 1:
                one.write(ended(name))
                await world.clock.sleep(0.003)
        await one.writer.flush()
        writing.cancel()

    async def two_lives(world: Ports) -> None:
        await one_life(world, 1)
        await one_life(world, 2)

    async def after(scene: Scene, died: bool) -> None:
        _, world = scene.process("second")
        for epoch in (3, 4):
            await one_life(world, epoch)
        log = scene.fleet.store.requests
        one = ledger(world.requests, 5, world.clock)
        assert await one.open() == 1
        writing = asyncio.ensure_future(one.writer.run())
        await one.writer.flush()
        writing.cancel()
        found = await messages(log)
        assert list(terminal_events(found)) == []
        assert list(fences(found)) == []

    list(every_crash(two_lives, after))
    assert left >= {0, 1, 2}
