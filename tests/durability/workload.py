"""Writers under load, each with its history: what the runs of this folder share."""

import asyncio
import random
from array import array
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence

from headwater.events.ports import Log
from headwater.events.writer import Writer, WriterFenced
from headwater.schemas import subjects
from headwater.schemas.clock import SystemClock
from headwater.schemas.events import Event
from tests.durability.history import Key, Life, LogContent, mark, marked
from tests.faults.report import Violation

NS = "durability"
POOL = "p"
STREAM = subjects.pool_stream(NS, POOL)

OFFER_EVENTS_MAX = 80
"""Most events offered at once, so that messages are of many sizes."""

TICK_S = 0.01
POLL_S = 0.002
UNTIL_S = 120.0


class Client:
    """One life of a real `Writer`, its history, and how long each of its events waited for its answer."""

    def __init__(self, log: Log, writer: str, epoch: int) -> None:
        subject = subjects.pool_subject(NS, POOL, "load", writer)
        self.life = Life(Key(subject, writer, epoch))
        self.latencies_s = array("d")
        self._clock = SystemClock()
        self._offered_s: deque[float] = deque()
        self._room = asyncio.Event()
        self._events = 0
        self.writer = Writer(log, subject, writer, epoch, self._clock, on_stored=self._on_stored)

    @property
    def acknowledged(self) -> int:
        """Events that the log is said to have."""
        return len(self.life.ok_events)

    def offer(self, events: int) -> None:
        """Offer the next so many events."""
        now = self._clock.monotonic_s()
        for _ in range(events):
            self._events += 1
            self.life.invoke(self._events)
            assert self.writer.offer(marked(self._events)), "the writer's queue is full"
            self._offered_s.append(now)

    def _on_stored(self, position: int, events: Sequence[Event]) -> None:
        now = self._clock.monotonic_s()
        for event in events:
            self.life.ok(mark(event), position)  # type: ignore[arg-type]
            self.latencies_s.append(now - self._offered_s.popleft())
        self._room.set()

    async def run(self) -> None:
        """Append until cancelled, or until a later life writes: then what was left is fenced."""
        try:
            await self.writer.run()
        except WriterFenced:
            done = set(self.life.ok_events)
            for event in self.life.invoked:
                if event not in done:
                    self.life.fenced(event)

    async def offer_as_acknowledged(self, dice: random.Random) -> None:
        """Offer for ever, never more than a batch ahead of the answers."""
        while True:
            if self.writer.pending < OFFER_EVENTS_MAX:
                self.offer(dice.randint(1, OFFER_EVENTS_MAX))
                # Others write, and kill, in between.
                await asyncio.sleep(0)
            else:
                self._room.clear()
                await self._room.wait()

    async def offer_at(self, events_per_s: float) -> None:
        """Offer for ever at a steady rate, whether or not anything is acknowledged."""
        began, offered = self._clock.monotonic_s(), 0
        while True:
            due = int((self._clock.monotonic_s() - began) * events_per_s)
            self.offer(due - offered)
            offered = due
            await asyncio.sleep(TICK_S)


async def read_content(log: Log) -> LogContent:
    """Everything the log holds now."""
    content = LogContent()
    async for piece in log.read(0, follow=False):
        content.add_slice(piece)
    return content


class Follower:
    """A reader that follows while everything is being hurt; `content` is what it was given."""

    def __init__(self, log: Log) -> None:
        self.content = LogContent()
        self._log = log

    async def run(self) -> None:
        """Read until cancelled."""
        slices = self._log.read(0, follow=True)
        assert isinstance(slices, AsyncGenerator)
        try:
            async for piece in slices:
                self.content.add_slice(piece)
        finally:
            await slices.aclose()


async def settle(clients: list[Client], within_s: float) -> list[Violation]:
    """Wait until nothing is pending any more."""
    try:
        async with asyncio.timeout(within_s):
            await asyncio.gather(*(client.writer.flush() for client in clients))
    except TimeoutError:
        waiting = sum(client.writer.pending for client in clients)
        return [Violation("pending", waiting, f"still not stored after {within_s:.1f} s")]
    return []


async def pause(seconds: float, tasks: "list[asyncio.Task[None]]") -> None:
    """Let the tasks run for so long; one that ended ends the run at once, with its error if it has one."""
    done, _ = await asyncio.wait(tasks, timeout=max(0.0, seconds), return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
        raise RuntimeError(f"{task} ended")


async def until(condition: Callable[[], bool], tasks: "list[asyncio.Task[None]]") -> None:
    """Wait for the condition while the tasks run, as `pause` does."""
    async with asyncio.timeout(UNTIL_S):
        while not condition():
            await pause(POLL_S, tasks)


def percentile(values: "array[float]", share: float) -> float:
    """Nearest rank; 0 for no values."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))] if ranked else 0.0
