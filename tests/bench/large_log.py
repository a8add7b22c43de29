"""Long logs of a made-up fleet, for measurements of what reads them: `python -m tests.bench.large_log URL NAMESPACE EVENTS`.

The decisions are a router's own, so that a replay verifies them. Of the pool's events about 5 % are decisions, 20 % load reports and
75 % KV events; the request log has four events of each request. Positions count as the server does if the streams are empty.
"""

import argparse
import asyncio
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np

from headwater.events.jetstream import Connection
from headwater.events.ports import Record
from headwater.ops.nats.server import open_ports
from headwater.router.decide import DecisionContext, decide, prompt_of
from headwater.router.state import RouterState
from headwater.schemas.clock import Clock, SystemClock
from headwater.schemas.encoding import NO_DIGEST, SCHEMA_VERSION, Batch, Sealed, seal
from headwater.schemas.events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Event,
    LoadReported,
    RequestAccepted,
    RequestEnded,
    RequestRouted,
    RequestStarted,
    WorkerJoined,
)
from headwater.schemas.hashing import U64, pack_hashes
from headwater.schemas.names import unique_ids
from headwater.schemas.routing import Decision, RouteQuery, Weights
from headwater.schemas.subjects import PoolKind, pool_subject, request_subject

POOL = "p"
WORKERS = 8
BLOCK = 16
SHARED_BLOCKS = 32
OWN_BLOCKS = 8
PREFIXES = 200
OUTPUT_BLOCKS = 8
CAPACITY_BLOCKS = 40_000
"""What a worker holds; beyond it, it removes its oldest blocks."""

IN_FLIGHT = 32
SYNC_MESSAGES = 4_000


class Written(NamedTuple):
    """A message for a log, and how many events it has."""

    subject: str
    sealed: Sealed
    events: int

    @property
    def data(self) -> bytes:
        """Its bytes."""
        return self.sealed.data


class _Running(NamedTuple):
    name: str
    decision: Decision
    prompt: U64


class MadeUpFleet:
    """Writes a pool log and a request log, message by message. `ids` are the names of its requests."""

    def __init__(self, ns: str, clock: Clock, seed: int = 1, workers: int = WORKERS) -> None:
        self.state = RouterState()
        self._ns = ns
        self._clock = clock
        self._ids = unique_ids(clock.wall_ns)
        self._random = np.random.default_rng(seed)
        self._prefixes = [self._blocks(SHARED_BLOCKS) for _ in range(PREFIXES)]
        self._heads: dict[str, tuple[int, bytes]] = {}
        self._running: deque[_Running] = deque()
        self._in_flight = max(IN_FLIGHT, 4 * workers)
        self._held: dict[str, deque[U64]] = {f"w{number}": deque() for number in range(workers)}
        self._blocks_held = dict.fromkeys(self._held, 0)
        self._decisions = 0
        self._names = 0
        self._messages = self._tell()
        self.requests: list[str] = []
        """Names of the requests, in order."""

    def messages(self) -> Iterator[Written]:
        """The messages of both logs, without end; a second call goes on where the first was left."""
        return self._messages

    def _tell(self) -> Iterator[Written]:
        for worker in self._held:
            joined = WorkerJoined(worker, 1, "sim", "sim", "both", BLOCK, CAPACITY_BLOCKS, 256)
            yield self._pool("fleet", worker, joined)
            yield self._pool("kv", worker, BlocksCleared())
        while True:
            yield from self._begin()
            if len(self._running) > self._in_flight:
                yield from self._finish(self._running.popleft())

    def _begin(self) -> Iterator[Written]:
        name = f"chatcmpl-{self._ids()}"
        self.requests.append(name)
        prefix = self._prefixes[min(int(self._random.exponential(PREFIXES / 8)), PREFIXES - 1)]
        prompt = np.concatenate([prefix, self._blocks(OWN_BLOCKS)])
        tokens = len(prompt) * BLOCK + 5
        attempt = f"{name}-0-1"
        query = RouteQuery(attempt, tokens, 200, pack_hashes(prompt))
        self._decisions += 1
        context = DecisionContext(
            self._decisions, self.state.position, self._decisions - 1, self._clock.wall_ns(), Weights(), False
        )
        decision = decide(
            self.state.index, self.state.loads, self.state.cold, prompt_of(query), query, context
        )
        if not isinstance(decision, Decision):
            raise RuntimeError(f"a fleet without faults refuses nothing: {decision}")
        yield self._requests(RequestAccepted(name, "sim", "chat", tokens, 200, True))
        yield self._pool("route", "r1", decision)
        yield self._requests(RequestRouted(name, 0, attempt, decision.worker, 1, 0))
        yield self._load(decision.worker, accepted=(attempt,))
        known = decision.chosen.cached_blocks
        fresh = prompt[known:]
        cuts = np.array_split(fresh, 4) if len(fresh) >= 4 else [fresh]
        parent = int(prompt[known - 1]) if known else 0
        events = []
        for part in cuts:
            if len(part):
                events.append(BlocksStored(parent, pack_hashes(part)))
                parent = int(part[-1])
        self._hold(decision.worker, fresh)
        if events:
            yield self._pool("kv", decision.worker, *events)
        cached = known * BLOCK
        yield self._load(
            decision.worker,
            prefilled=(attempt,),
            cached=(cached,),
            prefills=((tokens - cached, 2_000 + 20 * (tokens - cached)),),
        )
        yield self._requests(RequestStarted(name, 0, decision.worker, 1, cached, 30.0))
        self._running.append(_Running(name, decision, prompt))

    def _finish(self, one: _Running) -> Iterator[Written]:
        worker, attempt = one.decision.worker, one.decision.request
        output = self._blocks(OUTPUT_BLOCKS)
        parents = [int(one.prompt[-1]), *output[:-1].tolist()]
        stored = [BlocksStored(parent, pack_hashes(output[at : at + 1])) for at, parent in enumerate(parents)]
        self._hold(worker, output)
        yield self._pool("kv", worker, *stored[: OUTPUT_BLOCKS // 2])
        yield self._pool("kv", worker, *stored[OUTPUT_BLOCKS // 2 :])
        removed: list[Event] = []
        while self._blocks_held[worker] > CAPACITY_BLOCKS:
            oldest = self._held[worker].popleft()
            self._blocks_held[worker] -= len(oldest)
            removed.append(BlocksRemoved(pack_hashes(oldest)))
        if removed:
            yield self._pool("kv", worker, *removed)
        yield self._load(
            worker, finished=(attempt,), step_us=12_000, gaps=50, outputs=((200, 128),), answered=((600, 0),)
        )
        cached = one.decision.chosen.cached_blocks * BLOCK
        yield self._requests(RequestEnded(one.name, "stop", 128, cached, 0, 30.0, 1_500.0))

    def _load(self, worker: str, **fields: Any) -> Written:
        running = int(self._random.integers(1, 9))
        return self._pool("load", worker, LoadReported(running, 0, 40 * running, CAPACITY_BLOCKS, **fields))

    def _hold(self, worker: str, blocks: U64) -> None:
        if len(blocks):
            self._held[worker].append(blocks)
            self._blocks_held[worker] += len(blocks)

    def _blocks(self, count: int) -> U64:
        return self._random.integers(1, 1 << 63, count, dtype=np.uint64)

    def _pool(self, kind: PoolKind, writer: str, *events: Event) -> Written:
        subject = pool_subject(self._ns, POOL, kind, writer)
        written, batch = self._sealed(subject, writer, events)
        now_ns = self._clock.wall_ns()
        self.state.apply(Record(self.state.position + 1, subject, now_ns, batch))
        return written

    def _requests(self, event: Event) -> Written:
        return self._sealed(request_subject(self._ns, "edge"), "edge", (event,))[0]

    def _sealed(self, subject: str, writer: str, events: tuple[Event, ...]) -> tuple[Written, Batch[Any]]:
        seq, previous = self._heads.get(subject, (0, NO_DIGEST))
        # Without the time of a load report nothing depends on when the server stores it.
        wall_ns = 0 if isinstance(events[0], LoadReported) else self._clock.wall_ns()
        batch: Batch[Any] = Batch(SCHEMA_VERSION, writer, 1, seq + 1, wall_ns, events, previous=previous)
        sealed = seal(batch)
        self._heads[subject] = (seq + 1, sealed.digest)
        return Written(subject, sealed, len(events)), msgspec.structs.replace(batch, digest=sealed.digest)


async def write(client: Connection, fleet: MadeUpFleet, events: int, say: Callable[[str], None]) -> int:
    """Publish until the logs have so many events; returns the number of messages."""
    began, done, count = time.monotonic(), 0, 0
    for message in fleet.messages():
        count += 1
        done += message.events
        last = done >= events
        if last or count % SYNC_MESSAGES == 0:
            # The server's queue of a stream is bounded: wait until it is empty.
            await client.request(message.subject, message.data, timeout=60)
            if count % (50 * SYNC_MESSAGES) == 0:
                say(
                    f"{done:,} events in {count:,} messages, {done / (time.monotonic() - began):,.0f} events/s"
                )
        else:
            await client.publish(message.subject, message.data)
        if last:
            break
    return count


async def _main(url: str, ns: str, events: int, workers: int) -> int:
    fleet = MadeUpFleet(ns, SystemClock(), workers=workers)
    async with open_ports(url, ns, "large-log") as ports:
        log: Any = await ports.pool_log(POOL)
        count = await write(log._client, fleet, events, lambda text: print(text, file=sys.stderr))
        # The last message that was waited for may be one of the other log.
        async with asyncio.timeout(60):
            while (await log.bounds()).last < fleet.state.position:
                await asyncio.sleep(0.1)
    requests = fleet.requests
    print(f"{events:,} events, {count:,} messages, {len(requests):,} requests")
    for share in (0.01, 0.5, 0.99):
        print(requests[int(share * len(requests))])
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("namespace")
    parser.add_argument("events", type=int)
    parser.add_argument("--workers", type=int, default=WORKERS)
    given = parser.parse_args()
    sys.exit(asyncio.run(_main(given.url, given.namespace, given.events, given.workers)))
