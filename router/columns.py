"""The columns of workers: what a decision reads of every worker, as arrays with one row for each, in order of their names.

The fold marks the workers that an event changes, and a row is written again when the next decision needs it. So a decision
costs no Python per worker, and the fold no more than before. The arrays follow from `Loads` and are not part of the state.
"""

from hashlib import blake2b
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from headwater.router.estimates import CLASSES_MAX, StepModel
from headwater.router.index.prefix_index import PrefixIndex
from headwater.router.worker import DECIDED, QUEUE_MAX, SWAPPED_NS_MAX, UNACCEPTED_NS_MAX, Traits, Worker
from headwater.schemas.jit import kernel
from headwater.schemas.routing import Constraints

WORKER_ROW: Final = np.dtype(
    [
        ("kind", "i8"),
        ("role", "i8"),
        ("pairs", "i8"),
        ("serves_whole", "i8"),
        ("block_size", "i8"),
        ("total_blocks", "i8"),
        ("used_blocks", "i8"),
        ("waiting", "i8"),
        ("requests", "i8"),
        ("prefill_tokens", "i8"),
        ("decode_blocks", "i8"),
        ("unaccepted_ns", "i8"),
        ("computing_ns", "i8"),
        ("computing_tokens", "i8"),
        ("computing_until_ns", "i8"),
        ("model", "i8"),
        ("pace", "f8"),
        ("running", "i8"),
        ("step_ms", "f8"),
        ("max_running", "i8"),
        ("base_ms", "f8"),
        ("request_ms", "f8"),
        ("block_ms", "f8"),
        ("least_ms", "f8"),
        ("queued_prompts", "i8"),
        ("signal_age_ms", "f8"),
        ("queue_length", "i8"),
    ]
)
"""One worker. `kind` is the number of its traits, `pairs` that of its kind of hand-off and its revision (0: none).

The oldest decision that it has not accepted was made at `unaccepted_ns`. It computes `computing_tokens` since `computing_ns`,
which is true until `computing_until_ns`. `model` is the row of its engine's step times, `pace` its own factor of them. When it
last reported, it was `running` this many requests, of at most `max_running`, with `step_ms` between two tokens of each. The next
four are its `DecodeLine`. `queued_prompts` were routed to it and are not computed. Where its reports are late, `queue_length` of
those, the oldest, are listed in `queues`.
"""

ROLES: Final = {"both": 0, "prefill": 1, "decode": 2, "encode": 3}
NEVER: Final = 1 << 62
"""Later than any time in nanoseconds, and more than any count."""

SETTLED_NS: Final = UNACCEPTED_NS_MAX - SWAPPED_NS_MAX
"""While the oldest unaccepted decision is younger than this, all of a worker's requests count."""

LATE_MS: Final = 10.0
"""Workers whose load reports are stored later than this after they were written are assumed to have computed further since."""

PLACEMENTS_MAX: Final = 1_024
"""Constraints whose outcome for each kind of worker is remembered."""

Flags = NDArray[np.uint8]
I64 = NDArray[np.int64]
F64 = NDArray[np.float64]


class Fleet(Protocol):
    """What the rows are written from: `Loads`."""

    workers: dict[str, Worker]
    steps: dict[str, StepModel]


@kernel
def find_overdue(table: Any, now_ns: int, rows: Any) -> int:
    """Write the rows whose sums depend on the time to `rows`; returns their count."""
    count = 0
    for row in range(table.shape[0]):
        waits_ns = now_ns - table[row]["unaccepted_ns"]
        if waits_ns >= SETTLED_NS or now_ns > table[row]["computing_until_ns"]:
            rows[count] = row
            count += 1
    return count


class WorkerColumns:
    """The columns of a pool's workers.

    The fold adds the workers that an event changed to `touched`, those whose traits it changed to `changed` too, and engines whose step times it taught to `taught`; it sets `stale` when there are other workers or engines. Call `refresh` before
    reading `table`, and `refresh_at` before a decision at a time.

    `keys` are digests of the workers' incarnations. `classes`, `lengths` and `times` are the engines' step times; `classes` is 0 where too
    little is known, and in row 0, which is that of engines without any. `kinds` are the different traits, `placements` what
    constraints make of each. `queues`, shape (workers, `QUEUE_MAX`, 2), are the
    prompts listed for each worker: when they were routed to it, and their uncached tokens.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.touched: set[str] = set()
        self.changed: set[str] = set()
        self.taught: set[str] = set()
        self.stale = True
        self.names: list[str] = []
        self.rows: dict[str, int] = {}
        self.workers: list[Worker] = []
        self.kinds: list[Traits] = []
        self.placements: dict[Constraints, tuple[Flags, NDArray[np.float64]]] = {}
        self._numbers: dict[Traits, int] = {}
        self._pairs: dict[tuple[str, str], int] = {}
        self._engines: dict[str, int] = {}
        self._slots: tuple[PrefixIndex | None, int, I64] = (None, -1, np.zeros(0, np.int64))

    def refresh(self) -> None:
        """Write the rows that changed."""
        if self.stale or len(self.kinds) > 2 * len(self.names) + 16:
            self._rebuild()
        elif self.touched:
            for engine in self.taught:
                self._copy_models(engine)
            for name in self.changed:
                row = self.rows[name]
                self._described[row] = self._describe(self.workers[row])
            for name in self.touched:
                self._write(self.rows[name])
            self.touched.clear()
            self.changed.clear()
            self.taught.clear()

    def refresh_at(self, now_ns: int) -> None:
        """Write the rows that changed, and those of workers with decisions that no longer count, as of `now_ns`."""
        self.refresh()
        for row in self._overdue[: find_overdue(self.table, now_ns, self._overdue)].tolist():
            worker, record = self.workers[row], self.table[row]
            record["prefill_tokens"], record["decode_blocks"] = worker.promised(now_ns)
            record["queued_prompts"] = worker.queued_prompts(now_ns)
            record["computing_ns"], record["computing_tokens"] = worker.computing_since(now_ns)
            if worker.signal_age_ms >= LATE_MS:
                self._write_queue(row, worker.list_queue(now_ns))
            self.touched.add(worker.name)

    def slots(self, index: PrefixIndex) -> I64:
        """The row of the index's bits for each worker; -1 for none."""
        slots_index, version, slots = self._slots
        if slots_index is not index or version != index.slots_version or len(slots) != len(self.names):
            slots = np.array([index.slots.get(name, -1) for name in self.names], np.int64)
            self._slots = (index, index.slots_version, slots)
        return slots

    def _rebuild(self) -> None:
        workers = self._fleet.workers
        self.names = sorted(workers)
        self.rows = {name: row for row, name in enumerate(self.names)}
        self.workers = [workers[name] for name in self.names]
        self.kinds.clear()
        self._numbers.clear()
        self.placements.clear()
        self._pairs = {}
        count = len(self.names)
        self._engines = {engine: 1 + at for at, engine in enumerate(self._fleet.steps)}
        models = 1 + len(self._engines)
        self.table: NDArray[Any] = np.zeros(count, WORKER_ROW)
        # Apart from the rows, which a decision reads whole: few workers report late.
        self.queues: I64 = np.zeros((count, QUEUE_MAX, 2), np.int64)
        self.classes: I64 = np.zeros(models, np.int64)
        self.lengths: F64 = np.zeros((models, CLASSES_MAX))
        self.times: F64 = np.zeros((models, CLASSES_MAX))
        self._overdue: I64 = np.zeros(count, np.int64)
        self._slots = (None, -1, np.zeros(0, np.int64))
        for engine in self._fleet.steps:
            self._copy_models(engine)
        self.keys: NDArray[np.uint64] = np.array([_key_of(worker) for worker in self.workers], np.uint64)
        self._described = [self._describe(worker) for worker in self.workers]
        for row in range(count):
            self._write(row)
        self.touched.clear()
        self.changed.clear()
        self.taught.clear()
        self.stale = False

    def _copy_models(self, engine: str) -> None:
        at, model = self._engines[engine], self._fleet.steps[engine]
        count = len(model.kinds)
        self.classes[at] = count if model.learned else 0
        self.lengths[at, :count] = model.tokens
        self.times[at, :count] = model.ms

    def _describe(self, worker: Worker) -> tuple[int, ...]:
        """The fields that change only with a worker's traits: the first ones of a row."""
        traits = worker.traits
        return (
            self._number_of(traits),
            ROLES[worker.role],
            self._number_of_pair(worker.pairs_with, worker.revision),
            traits.serves_whole,
            worker.block_size,
        )

    def _write(self, row: int) -> None:
        worker = self.workers[row]
        unaccepted_ns = NEVER
        for request in worker.unaccepted:
            unaccepted_ns = worker.requests[request].decided_ns
            break
        since_ns, tokens, until_ns = 0, 0, NEVER
        for request in worker.computing:
            active = worker.requests[request]
            since_ns, tokens = max(active.decided_ns, worker.reported_ns), active.uncached_tokens
            if active.stage == DECIDED:
                until_ns = active.decided_ns + UNACCEPTED_NS_MAX
            break
        values = (
            *self._described[row],
            worker.total_blocks,
            worker.used_blocks,
            worker.waiting,
            len(worker.requests),
            worker.prefill_tokens,
            worker.decode_blocks,
            unaccepted_ns,
            since_ns,
            tokens,
            until_ns,
            self._engines.get(worker.step_kind, 0),
            worker.pace,
            worker.running,
            worker.step_ms,
            max(1, worker.max_running),
            *worker.decode_model.line,
            len(worker.computing),
            worker.signal_age_ms,
            0,
        )
        try:
            self.table[row] = values
        except OverflowError:
            # No worker counts so far; what it wrote must not stop decisions.
            self.table[row] = tuple(min(max(number, -NEVER), NEVER) for number in values)
        if worker.signal_age_ms >= LATE_MS:
            self._write_queue(row, worker.list_queue(0))

    def _write_queue(self, row: int, queue: list[tuple[int, int]]) -> None:
        self.table[row]["queue_length"] = len(queue)
        for at, (decided_ns, tokens) in enumerate(queue):
            self.queues[row, at] = min(decided_ns, NEVER), min(tokens, NEVER)

    def without_revisions(self) -> NDArray[Any]:
        """The rows as algorithm 1 read them: it paired workers of different revisions."""
        if all(not worker.revision for worker in self.workers):
            return self.table
        table = self.table.copy()
        table["pairs"] = [self._number_of_pair(worker.pairs_with, "") for worker in self.workers]
        return table

    def _number_of_pair(self, pairs_with: str, revision: str) -> int:
        """The number of workers that exchange KV; 0 for those that exchange none."""
        return self._pairs.setdefault((pairs_with, revision), len(self._pairs) + 1) if pairs_with else 0

    def _number_of(self, traits: Traits) -> int:
        number = self._numbers.get(traits)
        if number is None:
            number = self._numbers[traits] = len(self.kinds)
            self.kinds.append(traits)
            self.placements.clear()
        return number


def _key_of(worker: Worker) -> int:
    name = f"{worker.name}.{worker.epoch}".encode()
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "little")
