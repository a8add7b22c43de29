"""`headwater bench snapshot`: taking, saving and opening a router's state of 10 M blocks, with a real server."""

import asyncio
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median

import msgspec
import numpy as np

from headwater.events.jetstream import JetStreamBlobs, connect
from headwater.events.jetstream.streams import ensure_namespace
from headwater.events.snapshot_bytes import SnapshotCache
from headwater.events.snapshot_store import SnapshotStore
from headwater.ops.bench.report import Measure, Report, servers
from headwater.router.index.pack import prepare
from headwater.router.state import RouterState
from headwater.schemas import subjects
from headwater.schemas.events import WorkerJoined
from headwater.schemas.hashing import U64

BLOCKS = 10_000_000
WORKERS = 16
CHAIN = 64
ROUNDS = 3
POOL = "bench-b16"


async def bench(blocks: int = BLOCKS) -> Report:
    """Each measure is the median of three rounds. Files and the server's store are in the system's file cache.

    A round that uses memory for the first time is slower, as the host has to allocate it; the slowest rounds are among
    the conditions.
    """
    state = filled(blocks)
    _touch_memory(4 * state.index.nbytes)
    folder = Path(tempfile.mkdtemp(prefix="headwater-bench-"))
    try:
        async with servers(folder / "nats", 1) as url:
            client = await connect(url, "bench")
            try:
                await ensure_namespace(client, "bench")
                return await _measure(state, JetStreamBlobs(client, subjects.blob_bucket("bench")), folder)
            finally:
                await client.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def filled(blocks: int) -> RouterState:
    """A state with this many blocks, in chains of 64 over 16 workers, in a table of its final size."""
    rng = np.random.default_rng(0)
    hashes: U64 = rng.integers(1, 2**63, blocks, dtype=np.uint64)
    state = RouterState()
    state.position = blocks // CHAIN
    for number in range(WORKERS):
        state.loads.join(WorkerJoined(f"w{number}", 1, "m", "sim", "both", 16, blocks, 256))
        state.index.add_worker(f"w{number}")
    state.index.reserve(blocks)
    for number, at in enumerate(range(0, blocks, CHAIN)):
        state.index.store(f"w{number % WORKERS}", 0, 0, hashes[at : at + CHAIN])
    return state


def _touch_memory(size: int) -> None:
    """Use memory once and free it: in a virtual machine the first gigabyte may take the host a second."""
    np.ones(size, np.uint8)


class _Pauses:
    """The longest pause of the event loop."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Measure during the block."""

        async def beat() -> None:
            while True:
                began = time.perf_counter()
                await asyncio.sleep(0)
                self.longest_s = max(self.longest_s, time.perf_counter() - began)

        task = asyncio.create_task(beat())
        try:
            # The first interval is not a pause.
            await asyncio.sleep(0)
            yield
            # One more turn, so that a pause at the end counts.
            await asyncio.sleep(0)
        finally:
            task.cancel()


async def _measure(state: RouterState, blobs: JetStreamBlobs, folder: Path) -> Report:
    cache = SnapshotCache(folder / "cache")
    plain = SnapshotStore(blobs, POOL, prepare=prepare)
    cached = SnapshotStore(blobs, POOL, cache=cache, prepare=prepare)
    times: dict[str, list[float]] = {}
    digest, size = state.digest(), 0
    for number in range(ROUNDS):
        state.position += 1
        pauses = _Pauses()
        async with pauses.watched():
            began = time.perf_counter()
            loads = msgspec.to_builtins(state.loads)
            snapshot = await asyncio.to_thread(state.snapshot, loads, number)
            taken = time.perf_counter()
            manifest = await cached.save(snapshot)
            saved = time.perf_counter()
        digest, size = snapshot.digest, sum(chunk.size for chunk in manifest.chunks)
        del snapshot
        from_cache_s = await _opened(cached, digest)
        from_store_s = await _opened(plain, digest)
        for name, value in (
            ("take", taken - began),
            ("save", saved - taken),
            ("pause", pauses.longest_s),
            ("cache", from_cache_s),
            ("store", from_store_s),
        ):
            times.setdefault(name, []).append(value)
    rows = state.index.rows
    return Report(
        "snapshot",
        {
            "blocks": rows,
            "workers": WORKERS,
            "index": f"{state.index.nbytes / 1e6:.0f} MB",
            "median of": ROUNDS,
            "the slowest, in s": {name: round(max(values), 3) for name, values in times.items()},
            "server and client share": "this machine",
        },
        [
            Measure("open from the local cache", median(times["cache"]), "s", "at most 1"),
            Measure("open from the object store", median(times["store"]), "s", "at most 3"),
            Measure("take (the fold is paused, queries are answered)", median(times["take"]), "s"),
            Measure("save to the object store and the cache", median(times["save"]), "s"),
            Measure("longest pause of the event loop in take and save", median(times["pause"]) * 1000, "ms"),
            Measure("size", size / 1e6, "MB"),
            Measure("size per block", size / rows, "bytes/block"),
        ],
    )


async def _opened(store: SnapshotStore, digest: str) -> float:
    """Seconds until a new process has a state that it can fold and query."""
    began = time.perf_counter()
    snapshot = await store.newest(lambda _: True)
    if snapshot is None:
        raise RuntimeError("the snapshot that was just saved is missing")
    state = await asyncio.to_thread(RouterState.restore, snapshot)
    seconds = time.perf_counter() - began
    if state.digest() != digest:
        raise RuntimeError("the state that was read differs from the one that was saved")
    return seconds
