"""Candidates: each worker that passes the filters, with the work that the request would add and its cost.

A pool with prefill workers offers two ways. Remote prefill (leg "prefill") costs computing the prompt there, transferring what
the cheapest decode worker lacks, and that worker's memory. Aggregated (leg "") computes the prompt where it is
decoded, which delays the requests decoding there. An engine that only serves legs is offered for remote prefill only.

All workers are scored at once, as arrays (`cost.score_workers`). Tests compare the outcome with a plain implementation, bit for bit.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from headwater.router.decision import cost, work
from headwater.router.decision.context import ScoringContext
from headwater.router.decision.engine_draw import weights_for
from headwater.router.decision.filters import allows
from headwater.router.fold.columns import F64, I64, PLACEMENTS_MAX, Flags, WorkerColumns
from headwater.router.fold.worker import Traits, Worker
from headwater.schemas.constraints import Constraints
from headwater.schemas.events.route import Candidate
from headwater.schemas.messages.inference import Leg

_LEGS: Final[tuple[Leg, ...]] = ("", "", "prefill", "decode")
"""By `work.NO_CANDIDATE`, `WHOLE`, `PREFILL`, `DECODE`."""


class Candidates(Sequence[Candidate]):
    """Scored candidates in order of worker names. Each is built when it is asked for; the arrays hold a value for every worker.

    `rows` are the candidates' rows in the arrays: the workers of the fold as it was, so use them before it changes. `excluded` are
    those of workers that the query left out by name; `mixed`: some would serve the whole request, others a leg of it. `spare`, 0 to 1,
    is how idle the workers are that pass the filters.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        counts: I64,
        costs: F64,
        rows: I64,
        *,
        mixed: bool = False,
        excluded: Sequence[int] = (),
        spare: float = 0.0,
    ) -> None:
        self._workers = workers
        self._counts = counts
        self._costs = costs
        self.rows = rows
        self.mixed = mixed
        self.excluded = excluded
        self.spare = spare
        self.scores: F64 = costs[rows, work.SCORE]

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, at: int) -> Candidate: ...
    @overload
    def __getitem__(self, at: slice) -> list[Candidate]: ...
    def __getitem__(self, at: int | slice) -> Candidate | list[Candidate]:
        if isinstance(at, slice):
            return self._built(self.rows[at])
        return self._at(int(self.rows[at]))

    def _at(self, row: int) -> Candidate:
        return _candidate(self._workers[row], self._counts[row].tolist(), self._costs[row].tolist())

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self._built(self.rows))

    def at(self, places: Sequence[int]) -> list[Candidate]:
        """Those at some places: faster than one by one."""
        return self._built(self.rows[places])

    def _built(self, rows: I64) -> list[Candidate]:
        columns = zip(self._counts[rows].tolist(), self._costs[rows].tolist(), strict=True)
        return [_candidate(self._workers[row], *one) for row, one in zip(rows.tolist(), columns, strict=True)]

    def worker_of(self, at: int) -> Worker:
        """The worker of a candidate."""
        return self._workers[int(self.rows[at])]

    def quantity(self, which: int) -> I64:
        """One of the `counts` of `cost.score_workers`, for each candidate."""
        found: I64 = self._counts[self.rows, which]
        return found

    def times(self, which: int) -> F64:
        """One of the `costs` of `cost.score_workers`, for each candidate."""
        found: F64 = self._costs[self.rows, which]
        return found

    def engines(self) -> set[str]:
        """The engines that they run."""
        return {self._workers[row].engine for row in self.rows.tolist()}

    def of_engine(self, engine: str) -> "Candidates":
        """Those that run an engine."""
        return self.only(
            np.array([self._workers[row].engine == engine for row in self.rows.tolist()], np.bool_)
        )

    def only(self, places: NDArray[np.bool_]) -> "Candidates":
        """Those at which `places` is true."""
        return Candidates(self._workers, self._counts, self._costs, self.rows[places], mixed=self.mixed)


def _candidate(worker: Worker, counts: list[int], costs: list[float]) -> Candidate:
    """From a worker's row of each array."""
    leg, cached, lower, tokens, blocks, requests, assumed, loads = counts
    score, queue_ms, prefill_ms, transfer_ms, itl_ms = costs
    return Candidate(
        worker.name,
        worker.epoch,
        cached,
        lower,
        tokens,
        blocks,
        requests,
        score,
        _LEGS[leg],
        bool(loads),
        assumed,
        queue_ms,
        prefill_ms,
        transfer_ms,
        itl_ms,
    )


def score_candidates(scoring: ScoringContext) -> Candidates:
    """All candidates of the query, ordered by worker name. A pinned worker is offered for the whole request only."""
    wanted, weights, columns = scoring.constraints, scoring.weights, scoring.loads.columns
    columns.refresh_at(scoring.context.wall_ns)
    count = len(columns.names)
    counts: I64 = np.empty((count, 8), np.int64)
    costs: F64 = np.empty((count, 5))
    excluded = _excluded(columns, wanted)
    allowed, changes = _allowed(columns, wanted, weights_for(scoring.loads, wanted))
    if excluded:
        allowed[excluded] = 0
    whole, legs, spare = cost.score_workers(
        columns.table,
        columns.queues,
        (columns.classes, columns.lengths, columns.times),
        allowed,
        changes,
        _slots(scoring, columns),
        _credited(scoring, columns),
        scoring.depths,
        work.Asked(
            scoring.query.prompt_tokens,
            scoring.context.wall_ns,
            columns.rows.get(wanted.pinned, -2) if wanted.pinned else -1,
            wanted.leg == "decode",
            weights.estimate,
        ),
        work.cost_weights(weights),
        counts,
        costs,
    )
    rows = counts[:, work.LEG].nonzero()[0]
    return Candidates(
        columns.workers,
        counts,
        costs,
        rows,
        mixed=bool(whole and legs),
        excluded=excluded,
        spare=float(spare),
    )


def select_legs(scoring: ScoringContext, candidates: Candidates) -> Candidates:
    """The candidates that the policy picks from: a prompt with few uncached tokens is always prefilled where it is decoded."""
    if not candidates.mixed:
        return candidates
    whole = candidates.quantity(work.LEG) == work.WHOLE
    count = int(whole.sum())
    if not count or count == len(candidates):
        return candidates
    aggregated = candidates.only(whole)
    at = int(aggregated.scores.argmin())
    cheapest = aggregated[at]
    cached = (cheapest.cached_blocks + cheapest.lower_blocks) * aggregated.worker_of(at).block_size
    if scoring.query.prompt_tokens - cached <= scoring.weights.local_tokens:
        return aggregated
    return candidates.only(~whole) if scoring.weights.apart else candidates


def _allowed(
    columns: WorkerColumns, wanted: Constraints, engine_weights: Mapping[str, float]
) -> tuple[Flags, F64]:
    """Which workers pass the filters, and how many slots of LoRA adapters each must change.

    With `engine_weights`, an engine without one may get no request.
    """
    shared = (
        msgspec.structs.replace(wanted, exclude=(), pinned="") if wanted.exclude or wanted.pinned else wanted
    )
    known = columns.placements.get(shared)
    if known is None:
        known = (
            np.array([allows(traits, shared) for traits in columns.kinds], np.uint8),
            np.array([_slot_changes(traits, shared.lora_name) for traits in columns.kinds], np.float64),
        )
        if len(columns.placements) >= PLACEMENTS_MAX:
            columns.placements.clear()
        columns.placements[shared] = known
    kinds = columns.table["kind"]
    passing = known[0]
    if engine_weights:
        weighted = [engine_weights.get(traits.engine, 0.0) > 0 for traits in columns.kinds]
        passing = passing & np.array(weighted, np.uint8)
    allowed: Flags = passing[kinds]
    return allowed, known[1][kinds]


def _excluded(columns: WorkerColumns, wanted: Constraints) -> list[int]:
    """The rows of the workers that the query leaves out by name, each once: the edge may name one that is saturated as well."""
    rows: dict[int, None] = {}
    for incarnation in wanted.exclude:
        name, _, epoch = incarnation.rpartition(".")
        row = columns.rows.get(name)
        if row is not None and str(columns.workers[row].epoch) == epoch:
            rows[row] = None
    return list(rows)


def _slot_changes(traits: Traits, lora_name: str) -> int:
    if not lora_name or lora_name in traits.loras:
        return 0
    # With all slots taken, another adapter must be unloaded first.
    return 2 if len(traits.loras) >= traits.lora_slots else 1


def _slots(scoring: ScoringContext, columns: WorkerColumns) -> I64:
    """The row of `scoring.depths` of each worker; -1 for one whose cache is unknown."""
    slots = columns.slots(scoring.prefixes)
    if not scoring.cold:
        return slots
    slots = slots.copy()
    slots[[columns.rows[name] for name in scoring.cold if name in columns.rows]] = -1
    return slots


def _credited(scoring: ScoringContext, columns: WorkerColumns) -> I64:
    """How many leading blocks each worker is expected to hold by now."""
    found: I64 = np.zeros(len(columns.names), np.int64)
    for name, blocks in scoring.credited.items():
        row = columns.rows.get(name)
        if row is not None:
            found[row] = blocks
    return found
