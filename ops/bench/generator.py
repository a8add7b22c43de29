"""Sends a workload, in an open or a closed loop, and measures itself while it does.

Open loop: a conversation begins when it is due, whatever became of the others. Closed loop: a number of clients each begin the next
conversation when their last one is answered.
"""

import asyncio
import time
from array import array
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from random import Random
from typing import Any, Final, NamedTuple

import numpy as np

from headwater.ops.bench.client import Failure, StreamedAnswer
from headwater.ops.bench.workload import Conversation, Turn, Workload

BEAT_S: Final = 0.01
"""How often the generator measures how late its event loop is."""

START_S: Final = 0.05
"""From the start of a run to its first request."""


class Sample(NamedTuple):
    """One request. Times are seconds from the start of the run; -1 where there is none.

    `due_s` is when it was to be sent, `sent_s` when it was, `held_s` of the time between because as many as allowed were in flight.
    `first_s` and `last_s` are the arrivals of the first and the last piece of the answer. `output_tokens` are the server's count, or the number
    of pieces where `counted` is False. `cached_tokens` is -1 where the server does not say.
    """

    conversation: int
    turn: int
    due_s: float
    sent_s: float
    held_s: float
    first_s: float
    last_s: float
    asked_tokens: int
    asked_output: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    counted: bool
    gaps_ms: Sequence[float]
    failure: Failure | None = None


class OwnLag(NamedTuple):
    """How the generator itself did: the share of one core that it used, and milliseconds by which its event loop was late."""

    cpu_share: float
    loop_p99_ms: float
    loop_max_ms: float


class LoadRun(NamedTuple):
    """A finished run. `began_s` is a time of `time.time`."""

    samples: list[Sample]
    duration_s: float
    own: OwnLag
    began_s: float


class Pace(NamedTuple):
    """How a workload is sent. `rate` 0: it has times of its own if `timed`, else the loop is closed. `at_once` 0: no limit."""

    rate: float = 0.0
    at_once: int = 0
    constant: bool = False
    speed: float = 1.0
    timed: bool = False

    @property
    def open(self) -> bool:
        """Is it sent whether or not earlier requests are answered?"""
        return bool(self.rate) or self.timed


Post = Callable[[Turn, "list[tuple[str, str]]"], Awaitable[StreamedAnswer]]
"""Sends a turn after earlier ones, each a message and its answer."""


def due_times(workload: Workload, pace: Pace, random: Random) -> list[float]:
    """When each conversation is due in an open loop, in seconds from the first."""
    if not pace.rate:
        return [conversation.due_s / pace.speed for conversation in workload.conversations]
    due_s, times_s = 0.0, []
    for _ in workload.conversations:
        times_s.append(due_s)
        due_s += 1 / pace.rate if pace.constant else random.expovariate(pace.rate)
    return times_s


class Generator:
    """One run. `done` is called after each request."""

    def __init__(
        self, workload: Workload, pace: Pace, post: Post, done: Callable[[int], None] = lambda _: None
    ) -> None:
        self._workload = workload
        self._pace = pace
        self._post = post
        self._done = done
        self._samples: list[Sample] = []
        self._beats = array("d")
        self._free = asyncio.Semaphore(pace.at_once) if pace.open and pace.at_once else None
        self._start_s = 0.0

    async def run(self, random: Random) -> LoadRun:
        """Send everything, and return what came of it."""
        began_s, cpu_s = time.time(), time.process_time()
        self._start_s = time.perf_counter() + START_S
        heart = asyncio.create_task(self._beat())
        try:
            if self._pace.open:
                await self._send_when_due(due_times(self._workload, self._pace, random))
            else:
                await self._send_by_clients()
        finally:
            heart.cancel()
            with suppress(asyncio.CancelledError):
                await heart
        wall_s = time.perf_counter() - self._start_s
        first_s = min(sample.sent_s for sample in self._samples)
        late_ms = np.array(self._beats or [0.0]) * 1000
        lag = OwnLag(
            (time.process_time() - cpu_s) / (wall_s + START_S),
            float(np.percentile(late_ms, 99)),
            float(late_ms.max()),
        )
        return LoadRun(self._samples, wall_s - first_s, lag, began_s)

    async def _beat(self) -> None:
        while True:
            due_s = time.perf_counter() + BEAT_S
            await asyncio.sleep(BEAT_S)
            self._beats.append(max(0.0, time.perf_counter() - due_s))

    async def _send_when_due(self, due: Sequence[float]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number, (due_s, conversation) in enumerate(
                zip(due, self._workload.conversations, strict=True)
            ):
                await self._until(due_s)
                tasks.create_task(self._converse(number, conversation, due_s))

    async def _send_by_clients(self) -> None:
        ahead = iter(enumerate(self._workload.conversations))
        count = min(self._pace.at_once, len(self._workload.conversations))
        async with asyncio.TaskGroup() as tasks:
            for _ in range(count):
                tasks.create_task(self._client(ahead))

    async def _client(self, ahead: Iterator[tuple[int, Conversation]]) -> None:
        await self._until(0.0)
        for number, conversation in ahead:
            await self._converse(number, conversation, self._now_s())

    def _now_s(self) -> float:
        return time.perf_counter() - self._start_s

    async def _until(self, due_s: float) -> None:
        """Wait. Timers count whole milliseconds, and may end early."""
        while (left_s := due_s - self._now_s()) > 0:
            await asyncio.sleep(left_s)

    async def _converse(self, number: int, conversation: Conversation, due_s: float) -> None:
        """Send the turns one after another; a failure ends the conversation, and fails its other turns."""
        history: list[tuple[str, str]] = []
        before = 0
        for at, turn in enumerate(conversation.turns):
            if turn.pause_s:
                await asyncio.sleep(turn.pause_s)
            sample, text = await self._send(number, at, turn, history, due_s if not at else self._now_s())
            sample = sample._replace(asked_tokens=before + turn.tokens)
            self._add(sample)
            if sample.failure is not None:
                rest = Failure("earlier turn failed", sample.failure.cause)
                for later in range(at + 1, len(conversation.turns)):
                    self._add(sample._replace(turn=later, failure=rest))
                return
            history.append((turn.text, text))
            before += turn.tokens + turn.output_tokens

    def _add(self, sample: Sample) -> None:
        self._samples.append(sample)
        self._done(len(self._samples))

    async def _send(
        self, number: int, at: int, turn: Turn, history: list[tuple[str, str]], due_s: float
    ) -> tuple[Sample, str]:
        held_s = 0.0
        if self._free is not None:
            began_s = time.perf_counter()
            await self._free.acquire()
            held_s = time.perf_counter() - began_s
        try:
            answer = await self._post(turn, history)
        finally:
            if self._free is not None:
                self._free.release()
        return self._sample(number, at, turn, answer, due_s, held_s), answer.text

    def _sample(
        self, number: int, at: int, turn: Turn, answer: StreamedAnswer, due_s: float, held_s: float
    ) -> Sample:
        came, usage = answer.came_s, answer.usage
        counted = usage is not None and usage.completion_tokens is not None
        values: dict[str, Any] = {
            "prompt_tokens": usage.prompt_tokens if usage else -1,
            "output_tokens": (usage.completion_tokens if usage else 0) if counted else answer.pieces,
            "cached_tokens": usage.cached_tokens if usage else -1,
        }
        return Sample(
            number,
            at,
            due_s,
            answer.began_s - self._start_s,
            held_s,
            came[0] - self._start_s if came else -1.0,
            came[-1] - self._start_s if came else -1.0,
            turn.tokens,
            turn.output_tokens,
            counted=counted,
            gaps_ms=(np.diff(np.array(came)) * 1000).round(3).tolist() if len(came) > 1 else (),
            failure=answer.failure,
            **values,
        )
