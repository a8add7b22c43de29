"""`headwater bench log`: appending by both paths, reading and folding, next to raw nats-py in the same run."""

import asyncio
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig, StreamConfig

from headwater.events.jetstream import JetStreamLog, connect
from headwater.events.jetstream.streams import ensure_pool
from headwater.events.ports import Entry, Log, LogError, Record, Stored
from headwater.ops.bench import snapshot
from headwater.ops.bench.report import Measure, Report, servers
from headwater.router.state import RouterState
from headwater.schemas import subjects
from headwater.schemas.encoding import NO_DIGEST, SCHEMA_VERSION, Batch, Sealed, decode_batch, seal
from headwater.schemas.events import BlocksStored, Event, WorkerJoined

STREAM = "RAW"
ONE, MANY = "raw.one", "raw.many"


class RawNats:
    """A separate stream with as many replicas as the log. Every method returns seconds."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def make_stream(self, replicas: int) -> None:
        """Make the stream."""
        config = StreamConfig(name=STREAM, subjects=["raw.>"], num_replicas=replicas)
        await self._client.jetstream().add_stream(config)

    async def one_by_one(self, messages: list[bytes]) -> float:
        """`js.publish` of each, waiting for each."""
        js = self._client.jetstream()
        began = time.perf_counter()
        for data in messages:
            await js.publish(ONE, data)
        return time.perf_counter() - began

    async def all_at_once(self, messages: list[bytes]) -> float:
        """`js.publish_async` of all, until the last is acknowledged."""
        js = self._client.jetstream(publish_async_max_pending=4000)
        began = time.perf_counter()
        await asyncio.gather(*[await js.publish_async(MANY, data) for data in messages])
        return time.perf_counter() - began

    async def fetched(self, count: int) -> float:
        """`fetch(500)` of a pull consumer until `count` messages were received."""
        config = ConsumerConfig(ack_policy=AckPolicy.NONE)
        subscription = await self._client.jetstream().pull_subscribe(MANY, stream=STREAM, config=config)
        began = time.perf_counter()
        got = 0
        while got < count:
            got += len(await subscription.fetch(500, timeout=5))
        seconds = time.perf_counter() - began
        await subscription.unsubscribe()
        return seconds

    async def ordered(self, count: int) -> float:
        """The ordered push consumer with a callback until `count` messages were received."""
        done = asyncio.Event()
        got = 0

        async def on_message(_: Msg) -> None:
            nonlocal got
            got += 1
            if got == count:
                done.set()

        began = time.perf_counter()
        subscription = await self._client.jetstream().subscribe(
            MANY, cb=on_message, ordered_consumer=True, pending_msgs_limit=-1, pending_bytes_limit=-1
        )
        async with asyncio.timeout(60):
            await done.wait()
        seconds = time.perf_counter() - began
        await subscription.unsubscribe()
        return seconds


# The benchmark.

MESSAGES = 20_000
ONE_BY_ONE = 3_000
PER_CALL = 500
BLOCKS_A_MESSAGE = 16

FOLD_MESSAGES = 4_000
FOLD_EVENTS = 16
FOLD_BLOCKS = 64
TABLE_BLOCKS = 10_000_000
SNAPSHOT_BLOCKS = 1_000_000

NS, POOL, WORKER = "bench", "p", "w"
CLUSTER_S = 30.0


async def bench() -> Report:
    """Messages carry one event of 16 blocks, 250 bytes. Client and servers share the machine."""
    snapshot_report = await snapshot.bench(SNAPSHOT_BLOCKS)
    snapshots = [
        Measure(
            f"snapshot of {SNAPSHOT_BLOCKS / 1e6:.0f} M blocks: {measure.name}", measure.value, measure.unit
        )
        for measure in snapshot_report.measures
        if measure.unit == "s"
    ]
    measures = [*await _on_servers(1), *await _on_servers(3), *snapshots, *_fold()]
    conditions = {
        "messages": MESSAGES,
        "one by one": ONE_BY_ONE,
        "bytes a message": len(_messages(1, 2)[0].data),
        "messages per call": PER_CALL,
        "client and servers share": "this machine",
    }
    return Report("log", conditions, measures)


async def _on_servers(count: int) -> list[Measure]:
    """Appending and reading on a log with `count` replicas."""
    folder = Path(tempfile.mkdtemp(prefix="headwater-bench-"))
    kind = f"R{count}"
    try:
        async with servers(folder, count) as url, _logs(url, count) as (log, raw):
            await _begin(log)
            kv = subjects.pool_subject(NS, POOL, "kv", WORKER)
            fleet = subjects.pool_subject(NS, POOL, "fleet", WORKER)
            messages = _messages(1, 1 + 2 * MESSAGES + ONE_BY_ONE)
            single, rest = messages[:ONE_BY_ONE], messages[ONE_BY_ONE:]
            atomic, streamed = rest[:MESSAGES], rest[MESSAGES:]
            measures = []

            def note(label: str, number: int, seconds: float) -> None:
                measures.append(Measure(f"{kind} {label}", number / seconds / 1000, "k messages/s"))

            began = time.perf_counter()
            for message in single:
                await _stored(log, Entry(kv, message))
            note("append, one by one", len(single), time.perf_counter() - began)
            payloads = [message.data for message in single]
            note("  raw publish, one by one", len(payloads), await raw.one_by_one(payloads))
            began = time.perf_counter()
            for at in range(0, len(atomic), PER_CALL):
                await _stored(log, *(Entry(kv, message) for message in atomic[at : at + PER_CALL]))
            note(f"append, atomic batches of {PER_CALL}", len(atomic), time.perf_counter() - began)
            began = time.perf_counter()
            for at in range(0, len(streamed), PER_CALL):
                result = await log.ingest(kv, *streamed[at : at + PER_CALL], fence=fleet)
                assert isinstance(result, Stored), result
            note(f"ingest, {PER_CALL} a call", len(streamed), time.perf_counter() - began)
            payloads = [message.data for message in streamed]
            note("  raw publish_async", len(payloads), await raw.all_at_once(payloads))
            if count == 1:
                began = time.perf_counter()
                read = 0
                async for piece in log.read(0, follow=False):
                    read += len(piece.records)
                note("read, checked and decoded", read, time.perf_counter() - began)
                note("  raw fetch(500)", len(payloads), await raw.fetched(len(payloads)))
                note("  raw ordered consumer", len(payloads), await raw.ordered(len(payloads)))
            return measures
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@asynccontextmanager
async def _logs(url: str, replicas: int) -> "AsyncIterator[tuple[JetStreamLog, RawNats]]":
    """The pool's log, and a plain stream for raw nats-py."""
    client = await connect(url, "bench")
    try:
        async with asyncio.timeout(CLUSTER_S):
            while True:
                try:
                    await ensure_pool(client, NS, POOL, replicas=replicas)
                    break
                except LogError:
                    # A new cluster needs some seconds until all its members are connected.
                    await asyncio.sleep(0.2)
        raw = RawNats(client)
        await raw.make_stream(replicas)
        yield JetStreamLog(client, subjects.pool_stream(NS, POOL)), raw
    finally:
        await client.close()


async def _begin(log: Log) -> None:
    """Write the fence that streamed messages require."""
    joined = WorkerJoined(WORKER, 1, "m", "sim", "both", 16, 1000, 256)
    fleet = subjects.pool_subject(NS, POOL, "fleet", WORKER)
    await _stored(log, Entry(fleet, seal(Batch(SCHEMA_VERSION, WORKER, 1, 1, 0, (joined,)))))


async def _stored(log: Log, *entries: Entry) -> None:
    result = await log.append(*entries)
    if not isinstance(result, Stored):
        raise RuntimeError(f"not stored: {result}")


def _messages(first: int, last: int) -> list[Sealed]:
    """The worker's messages `first` to `last` - 1 on its cache subject, chained."""
    blocks = np.arange(BLOCKS_A_MESSAGE, dtype=np.uint64)
    sealed: list[Sealed] = []
    previous = NO_DIGEST
    for seq in range(first, last):
        event = BlocksStored(0, (blocks + np.uint64(seq * BLOCKS_A_MESSAGE)).tobytes())
        batch = Batch(SCHEMA_VERSION, WORKER, 1, seq, 1_800_000_000_000_000_000, (event,), previous=previous)
        sealed.append(seal(batch))
        previous = sealed[-1].digest
    return sealed


def _fold() -> list[Measure]:
    """Decoding and folding the tail after a snapshot of 10 M blocks, on one core."""
    state = RouterState()
    state.index.reserve(2 * TABLE_BLOCKS)
    rng = np.random.default_rng(0)
    state.apply(_record(1, (WorkerJoined(WORKER, 1, "m", "sim", "both", 16, 1000, 256),), "fleet"))
    for _ in range(TABLE_BLOCKS // 100_000):
        state.index.store(WORKER, 0, 0, rng.integers(1, 2**63, 100_000, dtype=np.uint64))
    stored_ns, position = 1_800_000_000_000_000_000, 2
    subject = subjects.pool_subject(NS, POOL, "kv", WORKER)
    tail: list[tuple[int, bytes]] = []
    previous = NO_DIGEST
    for seq in range(1, FOLD_MESSAGES + 1):
        events = tuple(
            BlocksStored(0, rng.integers(1, 2**63, FOLD_BLOCKS, dtype=np.uint64).tobytes())
            for _ in range(FOLD_EVENTS)
        )
        message = seal(Batch(SCHEMA_VERSION, WORKER, 1, seq, 0, events, previous=previous))
        previous = message.digest
        tail.append((position, message.data))
        position += 1
    began = time.perf_counter()
    for at, data in tail:
        if state.apply(Record(at, subject, stored_ns, decode_batch(data))) is not None:
            raise RuntimeError("the chain is broken")
    seconds = time.perf_counter() - began
    total = FOLD_MESSAGES * FOLD_EVENTS
    workload = f"tail onto {TABLE_BLOCKS / 1e6:.0f} M blocks ({FOLD_BLOCKS} blocks an event, {FOLD_EVENTS} events a message)"
    return [
        Measure(
            f"fold, decoded and checked: {workload}",
            total * FOLD_BLOCKS / seconds / 1e6,
            "M blocks/s",
            "at least 3",
        ),
        Measure("  the same in events", total / seconds / 1000, "k events/s"),
    ]


def _record(position: int, events: tuple[Event, ...], kind: subjects.PoolKind) -> Record:
    batch = Batch(SCHEMA_VERSION, WORKER, 1, 1, 0, events)
    subject = subjects.pool_subject(NS, POOL, kind, WORKER)
    return Record(position, subject, 0, decode_batch(seal(batch).data))
