"""`headwater bench route --workers N,…`: what a decision costs as the fleet grows. One process, one core, no NATS.

Every worker has served prompts (so its step times are known), holds some of the 100 prompts in part, and has requests running. Before
each decision its last decision and a load report are folded, as in a fleet: the arrays' rows of those workers are written again.
"""

import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from headwater.events.log import Record
from headwater.ops.bench.report import Measure, Report, percentile
from headwater.router.decision.context import DecisionContext
from headwater.router.decision.decide import decide, prompt_of
from headwater.router.fold.state import RouterState
from headwater.schemas import hashing
from headwater.schemas.encoding.codec import encode_batch
from headwater.schemas.encoding.envelope import SCHEMA_VERSION, Batch
from headwater.schemas.events.event import Event
from headwater.schemas.events.fleet import WorkerJoined
from headwater.schemas.events.kv import BlocksStored
from headwater.schemas.events.load import LoadReported
from headwater.schemas.events.route import Decision, RouteQuery, Weights

BLOCKS: Final = 64
BLOCK_SIZE: Final = 16
PROMPTS: Final = 100
DECISIONS: Final = 2_000
WARM_UP: Final = 200
RUNNING: Final = 4
"""Requests that a worker keeps; the oldest ends when another arrives."""

TARGETS_MS: Final = {8: 0.1, 64: 0.15, 256: 0.25, 1_024: 0.8}
EVENT_BYTES_MAX: Final = 2_048
START_NS: Final = 1_800_000_000_000_000_000
STEP_NS: Final = 2_000_000


class DecisionTimes(NamedTuple):
    """Of one fleet size: seconds of each decision, and the most bytes that one took in the log."""

    workers: int
    seconds: list[float]
    event_bytes: int


class BenchFleet:
    """A pool of `workers` simulated by their events alone."""

    def __init__(self, workers: int, prompts: list[hashing.U64]) -> None:
        self.state = RouterState()
        self.now_ns = START_NS
        self.names = [f"worker-{number}" for number in range(workers)]
        self._open: dict[str, list[str]] = {name: [] for name in self.names}
        draw = np.random.default_rng(workers)
        for name in self.names:
            self.fold(name, WorkerJoined(name, 1, "m", "sim", "both", BLOCK_SIZE, 40_000, 256))
            held = prompts[int(draw.integers(len(prompts)))][: int(draw.integers(1, BLOCKS))]
            self.fold(name, BlocksStored(0, hashing.pack_hashes(held)))
            lengths = draw.integers(100, 8_000, 20).tolist()
            self.fold(name, self._report((), tuple((tokens, tokens * 50) for tokens in lengths)))

    def fold(self, writer: str, event: Event) -> None:
        """Append one event to the pool's log and fold it."""
        batch: Batch[Any] = Batch(SCHEMA_VERSION, writer, 1, 0, self.now_ns, (event,))
        self.state.apply(Record(self.state.position + 1, "", self.now_ns, batch))

    def advance(self, decision: Decision) -> None:
        """Fold the decision and its worker's report."""
        self.now_ns += STEP_NS
        self.fold("router", decision)
        requests = self._open[decision.worker]
        requests.append(decision.request)
        ended = (requests.pop(0),) if len(requests) > RUNNING else ()
        report = self._report(ended, ((decision.prompt_tokens, 50_000),), (decision.request,))
        self.fold(decision.worker, report)

    def _report(
        self,
        finished: tuple[str, ...],
        prefills: tuple[tuple[int, int], ...],
        accepted: tuple[str, ...] = (),
    ) -> LoadReported:
        return LoadReported(
            RUNNING, 0, 9_000, 40_000, accepted, accepted, finished, prefills=prefills, step_us=9_000
        )


def measure(workers: int, decisions: int = DECISIONS) -> DecisionTimes:
    """Time decisions one by one: finding the prompt's blocks, scoring every worker, choosing, and the record."""
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, 256, (PROMPTS, BLOCKS * BLOCK_SIZE), dtype=np.uint32)
    prompts = [hashing.sequence_hashes(row, BLOCK_SIZE) for row in tokens]
    packed = [hashing.pack_hashes(prompt) for prompt in prompts]
    fleet = BenchFleet(workers, prompts)
    state, weights = fleet.state, Weights()
    seconds: list[float] = []
    most = 0
    for number in range(1, WARM_UP + decisions + 1):
        query = RouteQuery(
            f"bench-{number}", BLOCKS * BLOCK_SIZE + 5, 16, packed[int(draw.integers(PROMPTS))]
        )
        context = DecisionContext(number, state.position, number - 1, fleet.now_ns, weights, False)
        began = time.perf_counter()
        reply = decide(state.index, state.loads, state.cold, prompt_of(query), query, context)
        took = time.perf_counter() - began
        assert isinstance(reply, Decision)
        if number > WARM_UP:
            seconds.append(took)
            batch: Batch[Any] = Batch(SCHEMA_VERSION, "router-0", 1, number, fleet.now_ns, (reply,))
            most = max(most, len(encode_batch(batch)))
        fleet.advance(reply)
    return DecisionTimes(workers, seconds, most)


def bench(sizes: Sequence[int]) -> Report:
    """Decisions of fleets of these sizes."""
    conditions = {
        "prompt": f"{BLOCKS} blocks of {BLOCK_SIZE} tokens",
        "decisions": f"{DECISIONS:,} each, one at a time, each after a decision and a report were folded",
        "cores": 1,
    }
    return Report("route", conditions, [one for workers in sizes for one in measures(measure(workers))])


def measures(found: DecisionTimes) -> list[Measure]:
    """The figures of one fleet size, with the project's goals."""
    name, limit = f"{found.workers} workers", TARGETS_MS.get(found.workers)
    mean_ms = sum(found.seconds) / len(found.seconds) * 1_000
    return [
        Measure(f"{name}: decision, mean", mean_ms, "ms", f"at most {limit:g}" if limit else ""),
        Measure(f"{name}: decision, p50", percentile(found.seconds, 0.5) * 1_000, "ms"),
        Measure(f"{name}: decision, p99", percentile(found.seconds, 0.99) * 1_000, "ms"),
        Measure(
            f"{name}: message in the log, largest", found.event_bytes, "bytes", f"at most {EVENT_BYTES_MAX:,}"
        ),
    ]
