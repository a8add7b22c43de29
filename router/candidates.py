"""Candidates: each worker that passes the filters, with the work that the request would add and its cost.

A pool with prefill workers offers two ways. Remote prefill (leg "prefill") costs computing the prompt there, transferring what
the cheapest decode worker lacks, and that worker's memory. Aggregated (leg "") computes the prompt where it is
decoded, which delays the requests decoding there. An engine that only serves legs is offered for remote prefill only.

All workers are scored at once, as arrays (`cost.score_workers`). Tests compare the outcome with a plain implementation, bit for bit.

All filters but the last test what workers have in common with others (`Traits`), so that a decision tests each kind of worker once. The last
leaves out incarnations by name.

An engine of a weighted pool, and a revision or a policy of a split one, is drawn by weighted rendezvous hashing: each gets a time
from an exponential distribution with its weight as the rate, seeded by its name and by the request, and the earliest one is drawn.
So each is drawn in proportion to its weight; the requests of one session, or else of one conversation, always draw the same; a
change of weights moves only the sessions that it has to move; and where no worker of the drawn engine may take the request, the
order of the others is fixed too.

A request for a given worker or engine draws no engine, nor does a decode leg: its prefill leg has drawn. Nor do images for encode
workers: what the serving worker can read decides. The same holds for revisions. Those without a share come last: a pool whose workers
are all of other revisions than its split names still serves.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from hashlib import blake2b
from typing import Final, Literal, NamedTuple, get_args, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from headwater.router import cost
from headwater.router.columns import F64, I64, PLACEMENTS_MAX, Flags, WorkerColumns
from headwater.router.context import ScoringContext
from headwater.router.load import Loads
from headwater.router.worker import Traits, Worker
from headwater.schemas.events import LORA_ON_DEMAND
from headwater.schemas.inference import Leg
from headwater.schemas.routing import Candidate, Constraints, Draw, Preferences


class Filter(NamedTuple):
    """`keeps` tests one kind of worker; `reason` completes "none of the workers …". Skipped for requests it does not apply to."""

    name: str
    applies: Callable[[Constraints], bool]
    keeps: Callable[[Traits, Constraints], bool]
    reason: Callable[[Constraints], str]


def _has_capabilities(worker: Traits, constraints: Constraints) -> bool:
    # A worker that published no capabilities passes: its engine refuses what it cannot do.
    return not worker.capabilities or all(need in worker.capabilities for need in constraints.needs)


def _serves_lora(worker: Traits, constraints: Constraints) -> bool:
    loadable = worker.lora_slots > 0 and LORA_ON_DEMAND in worker.capabilities
    return constraints.lora_name in worker.loras or loadable


def _can_continue(worker: Traits, constraints: Constraints) -> bool:
    return worker.role != "prefill" and worker.pairs_with == constraints.pairs_with


FILTERS: Final[tuple[Filter, ...]] = (
    Filter(
        "capability",
        lambda wanted: bool(wanted.needs),
        _has_capabilities,
        lambda wanted: f"supports {', '.join(wanted.needs)}",
    ),
    Filter(
        "encode",
        lambda wanted: "encode" not in wanted.needs,
        lambda worker, wanted: worker.role != "encode",
        lambda wanted: "generates (all only encode media)",
    ),
    Filter(
        "embeddings",
        lambda wanted: "encode" in wanted.needs and bool(wanted.pairs_with),
        lambda worker, wanted: worker.pairs_with == wanted.pairs_with,
        lambda wanted: f"computes embeddings of the format {wanted.pairs_with}",
    ),
    Filter(
        "lora",
        lambda wanted: bool(wanted.lora_name),
        _serves_lora,
        lambda wanted: f"has LoRA adapter {wanted.lora_name} or can load it",
    ),
    Filter(
        "tier",
        lambda wanted: bool(wanted.tier),
        lambda worker, wanted: worker.tier == wanted.tier,
        lambda wanted: f"is of tier {wanted.tier}",
    ),
    Filter(
        "engine",
        lambda wanted: bool(wanted.engine),
        lambda worker, wanted: worker.engine == wanted.engine,
        lambda wanted: f"runs {wanted.engine}",
    ),
    Filter(
        "revision",
        lambda wanted: bool(wanted.revision),
        lambda worker, wanted: worker.revision == wanted.revision,
        lambda wanted: f"is of revision {wanted.revision}",
    ),
    Filter(
        "taint",
        lambda wanted: True,
        lambda worker, wanted: not worker.taints or set(worker.taints) <= set(wanted.tolerates),
        lambda wanted: "is free of taints that the request does not tolerate",
    ),
    Filter(
        "tokenizer",
        lambda wanted: bool(wanted.tokenizer),
        # A worker of a release that published none passes.
        lambda worker, wanted: worker.tokenizer in ("", wanted.tokenizer),
        lambda wanted: "has the tokenizer of the answer so far, so none can continue it",
    ),
    Filter(
        "media processor",
        lambda wanted: bool(wanted.media_processor),
        # A worker of a release that published none passes.
        lambda worker, wanted: worker.media_processor in ("", wanted.media_processor),
        lambda wanted: "processes media with the settings of the model card (restart those with other ones)",
    ),
    Filter(
        "role",
        lambda wanted: wanted.leg == "decode",
        _can_continue,
        lambda wanted: "can decode a prompt prefilled there",
    ),
    Filter(
        "state",
        lambda wanted: True,
        lambda worker, wanted: worker.takes_requests,
        lambda wanted: "takes requests (all are draining, paused or asleep)",
    ),
)
"""Permanent reasons come before passing ones: they are the more useful error."""


EXCLUDED_REASON: Final = "has not just failed this request"


def allows(traits: Traits, constraints: Constraints) -> bool:
    """Does a worker with these traits pass all filters, unless it is excluded by name?"""
    return all(filter.keeps(traits, constraints) for filter in FILTERS if filter.applies(constraints))


def _passes(filter: Filter, constraints: Constraints, worker: Worker) -> bool:
    return filter.keeps(worker.traits, constraints)


def _steps(constraints: Constraints) -> Iterator[tuple[str, Callable[[Worker], bool]]]:
    """(reason, test) of each filter that applies."""
    for filter in FILTERS:
        if filter.applies(constraints):
            yield filter.reason(constraints), partial(_passes, filter, constraints)
    if constraints.exclude:
        yield EXCLUDED_REASON, lambda worker: f"{worker.name}.{worker.epoch}" not in constraints.exclude


def explain_no_worker(workers: Sequence[Worker], constraints: Constraints) -> str:
    """The error for a request that no worker may take: the first filter that leaves none."""
    if not workers:
        return "no worker has joined this pool"
    if constraints.pinned and constraints.pinned not in {worker.name for worker in workers}:
        return f"worker {constraints.pinned} is not in this pool"
    eligible = list(workers)
    for reason, keeps in _steps(constraints):
        passed = [worker for worker in eligible if keeps(worker)]
        if not passed:
            rest = "" if len(eligible) == len(workers) else f" left of {len(workers)}"
            return f"none of the {len(eligible)} workers{rest} {reason}"
        eligible = passed
    if constraints.pinned:
        eligible = [worker for worker in eligible if worker.name == constraints.pinned]
    if eligible and not any(worker.serves_whole for worker in eligible):
        return _explain_split(eligible, constraints)
    return f"none of the {len(workers)} workers may take the request"


def _explain_split(workers: Sequence[Worker], constraints: Constraints) -> str:
    """Workers that only serve the legs of split requests passed the filters, and no two of them make a pair."""
    roles = {worker.role for worker in workers}
    if constraints.pinned and "prefill" not in roles:
        return f"worker {constraints.pinned} only decodes prompts that another worker prefilled"
    missing = next((role for role in ("prefill", "decode") if role not in roles), "")
    needed = f"a {missing} worker" if missing else "a prefill and a decode worker that can exchange KV"
    return f"the engines of this pool serve only split requests: it needs {needed}"


# Engine weights: which engine serves a request of a pool whose engines an operator has weighted.


def find_invalid_weight(weights: Mapping[str, float], workers: Sequence[Worker]) -> str:
    """Why an operator's weights cannot be set for these workers, or ""."""
    engines = {worker.engine: False for worker in workers}
    for worker in workers:
        engines[worker.engine] |= worker.takes_requests
    for engine, weight in sorted(weights.items()):
        if engine not in engines:
            present = ", ".join(sorted(engines)) or "none"
            return f"no worker of this pool runs engine {engine!r}; its engines are: {present}"
        if not (math.isfinite(weight) and weight >= 0):
            return f"the weight of {engine} is {weight:g}: it must be a finite number, and not negative"
    positive = sorted(engine for engine, weight in weights.items() if weight > 0)
    if not positive:
        return "every weight is 0, so no engine would get a request: give one of them a greater weight"
    if not any(engines[engine] for engine in positive):
        return (
            f"no worker of {' or '.join(positive)} takes requests (draining, paused or asleep), "
            "so no request could be served"
        )
    return ""


DrawnTrait = Literal["engine", "revision"]
"""What a request may draw of its worker."""


def shares_for(loads: Loads, wanted: Constraints, trait: DrawnTrait) -> Mapping[str, float]:
    """The weights by which a request draws its engine, or the shares by which it draws its revision; empty where it draws none."""
    is_image = "encode" in wanted.needs and wanted.pairs_with
    stated = wanted.engine if trait == "engine" else wanted.revision
    if wanted.pinned or stated or wanted.leg == "decode" or is_image:
        return {}
    return loads.engine_weights if trait == "engine" else loads.shares("revision")


def weighted_workers(loads: Loads, constraints: Constraints) -> list[Worker]:
    """The workers, by name, without those whose engine or revision may get no new request."""
    weights, shares = (shares_for(loads, constraints, trait) for trait in get_args(DrawnTrait))
    workers = [worker for _, worker in sorted(loads.workers.items())]
    if weights:
        workers = [worker for worker in workers if weights.get(worker.engine, 0.0) > 0]
    return [worker for worker in workers if shares.get(worker.revision, 1.0) > 0] if shares else workers


def drawing_key(preferences: Preferences, seed: int) -> str:
    """What decides a request's draws: its session, or else its conversation, or else its seed."""
    if preferences.session:
        return f"session {preferences.session}"
    return f"conversation {preferences.conversation}" if preferences.conversation else f"seed {seed}"


def order_by_draw(weights: Mapping[str, float], key: str) -> list[str]:
    """Names with a weight above 0: the one that `key` draws, then the others in the order in which they replace it."""
    return sorted(
        (name for name, weight in weights.items() if weight > 0),
        key=lambda name: (_arrival(name, key) / weights[name], name),
    )


def _arrival(name: str, key: str) -> float:
    """A draw from the exponential distribution of rate 1."""
    digest = blake2b(name.encode(), key=blake2b(key.encode()).digest(), digest_size=8).digest()
    return -math.log((int.from_bytes(digest, "little") + 0.5) / 2**64)


def draw_trait(
    loads: Loads, wanted: Constraints, key: str, trait: DrawnTrait, candidates: "Candidates"
) -> Draw | None:
    """The draw for a request with these candidates, one at least; None where it draws none.

    Of the candidates, all run engines with a weight. Their revisions may have no share: those come last.
    """
    shares = shares_for(loads, wanted, trait)
    if not shares:
        return None
    capable = candidates.values(trait)
    unlisted = dict.fromkeys(sorted(capable - shares.keys()), 1.0)
    order = [*order_by_draw(shares, key), *order_by_draw(unlisted, key)]
    used = next(name for name in order if name in capable)
    return _drawn(shares, order[0], used, lambda: _explain_undrawn(loads, wanted, trait, order[0]))


def draw_policy(loads: Loads, key: str, available: Set[str]) -> Draw | None:
    """The draw of a query that states no policy, among the policies that this release has; None without a split, or with none of them."""
    shares = loads.shares("policy")
    order = order_by_draw(shares, key)
    used = next((policy for policy in order if policy in available), None)
    if used is None:
        return None
    return _drawn(shares, order[0], used, lambda: f"this release has no policy {order[0]}")


def _drawn(weights: Mapping[str, float], drawn: str, used: str, explain: Callable[[], str]) -> Draw:
    return Draw(tuple(sorted(weights.items())), drawn, used, "" if used == drawn else explain())


def _explain_undrawn(loads: Loads, wanted: Constraints, trait: DrawnTrait, drawn: str) -> str:
    """Why no worker of the drawn engine or revision may take the request."""
    workers = [worker for _, worker in sorted(loads.workers.items()) if getattr(worker, trait) == drawn]
    if not workers:
        return f"no worker of {'revision ' if trait == 'revision' else ''}{drawn} is in the pool"
    reason = explain_no_worker(workers, wanted)
    if trait == "revision" and (wanted.exclude or loads.engine_weights):
        # With engine weights, the engine was drawn before: its workers are of other revisions.
        return f"{reason}, or runs the drawn engine"
    return reason


def explain_weights(loads: Loads, constraints: Constraints) -> str:
    """Why no worker is left of a pool that has some: the weights name none of its engines, or the split gives its revisions nothing."""
    engines, revisions = (shares_for(loads, constraints, trait) for trait in get_args(DrawnTrait))
    count = len(loads.workers)
    if engines and not any(engines.get(worker.engine, 0.0) > 0 for worker in loads.workers.values()):
        weights = ", ".join(f"{engine}={weight:g}" for engine, weight in sorted(engines.items()))
        return f"none of the {count} workers runs an engine with a weight above 0 ({weights})"
    shares = ", ".join(f"{revision}={share:g}" for revision, share in sorted(revisions.items()))
    return (
        f"none of the {count} workers is of a revision that may get requests ({shares}): start workers of another one, "
        "or change the shares with `headwater switch`"
    )


# Candidates.

_LEGS: Final[tuple[Leg, ...]] = ("", "", "prefill", "decode")
"""The leg of each kind of work: `cost.NO_CANDIDATE`, `WHOLE`, `PREFILL`, `DECODE`."""


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
        self.scores: F64 = costs[rows, cost.SCORE]

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
        """Return the candidates at some places, which is faster than one by one."""
        return self._built(self.rows[places])

    def _built(self, rows: I64) -> list[Candidate]:
        columns = zip(self._counts[rows].tolist(), self._costs[rows].tolist(), strict=True)
        return [
            _candidate(self._workers[row], *measures)
            for row, measures in zip(rows.tolist(), columns, strict=True)
        ]

    def worker_of(self, at: int) -> Worker:
        """The worker of a candidate."""
        return self._workers[int(self.rows[at])]

    def quantity(self, which: int) -> I64:
        """One of the `counts` of `cost.score_workers`, for each candidate."""
        quantities: I64 = self._counts[self.rows, which]
        return quantities

    def times(self, which: int) -> F64:
        """One of the `costs` of `cost.score_workers`, for each candidate."""
        costs: F64 = self._costs[self.rows, which]
        return costs

    def values(self, trait: DrawnTrait) -> set[str]:
        """Their engines, or their revisions."""
        return {getattr(self._workers[row], trait) for row in self.rows.tolist()}

    def having(self, trait: DrawnTrait, value: str) -> "Candidates":
        """Return the candidates of an engine, or of a revision."""
        rows = self.rows.tolist()
        return self.only(np.array([getattr(self._workers[row], trait) == value for row in rows], np.bool_))

    def only(self, places: NDArray[np.bool_]) -> "Candidates":
        """Return the candidates at which `places` is true."""
        return Candidates(self._workers, self._counts, self._costs, self.rows[places], mixed=self.mixed)


def _candidate(worker: Worker, counts: list[int], costs: list[float]) -> Candidate:
    """Return a candidate from a worker's row of each array."""
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
    constraints, weights, columns = scoring.constraints, scoring.weights, scoring.loads.columns
    columns.refresh_at(scoring.context.wall_ns)
    count = len(columns.names)
    counts: I64 = np.empty((count, 8), np.int64)
    costs: F64 = np.empty((count, 5))
    excluded = _excluded(columns, constraints)
    split = scoring.context.algorithm > 1
    weighted = shares_for(scoring.loads, constraints, "engine")
    shares = shares_for(scoring.loads, constraints, "revision") if split else {}
    allowed, changes = _allowed(columns, constraints, weighted, shares)
    if excluded:
        allowed[excluded] = 0
    whole, legs, spare = cost.score_workers(
        columns.table if split else columns.without_revisions(),
        columns.queues,
        (columns.classes, columns.lengths, columns.times),
        allowed,
        changes,
        _slots(scoring, columns),
        _credited(scoring, columns),
        scoring.depths,
        cost.Asked(
            scoring.query.prompt_tokens,
            scoring.context.wall_ns,
            columns.rows.get(constraints.pinned, -2) if constraints.pinned else -1,
            constraints.leg == "decode",
            weights.estimate,
        ),
        cost.cost_weights(weights),
        counts,
        costs,
    )
    rows = counts[:, cost.LEG].nonzero()[0]
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
    is_whole = candidates.quantity(cost.LEG) == cost.WHOLE
    count = int(is_whole.sum())
    if not count or count == len(candidates):
        return candidates
    aggregated = candidates.only(is_whole)
    at = int(aggregated.scores.argmin())
    cheapest = aggregated[at]
    cached = (cheapest.cached_blocks + cheapest.lower_blocks) * aggregated.worker_of(at).block_size
    if scoring.query.prompt_tokens - cached <= scoring.weights.local_tokens:
        return aggregated
    return candidates.only(~is_whole) if scoring.weights.apart else candidates


def _allowed(
    columns: WorkerColumns,
    constraints: Constraints,
    engine_weights: Mapping[str, float],
    revision_shares: Mapping[str, float],
) -> tuple[Flags, F64]:
    """Return which workers pass the filters, and how many slots of LoRA adapters each must change.

    With `engine_weights`, an engine without one may get no request, and with `revision_shares` a revision with the share 0.
    """
    shared = (
        msgspec.structs.replace(constraints, exclude=(), pinned="")
        if constraints.exclude or constraints.pinned
        else constraints
    )
    cached = columns.placements.get(shared)
    if cached is None:
        cached = (
            np.array([allows(traits, shared) for traits in columns.kinds], np.uint8),
            np.array([_slot_changes(traits, shared.lora_name) for traits in columns.kinds], np.float64),
        )
        if len(columns.placements) >= PLACEMENTS_MAX:
            columns.placements.clear()
        columns.placements[shared] = cached
    kinds = columns.table["kind"]
    passing = cached[0]
    if engine_weights:
        weighted = [engine_weights.get(traits.engine, 0.0) > 0 for traits in columns.kinds]
        passing = passing & np.array(weighted, np.uint8)
    if revision_shares:
        shared_in = [revision_shares.get(traits.revision, 1.0) > 0 for traits in columns.kinds]
        passing = passing & np.array(shared_in, np.uint8)
    allowed: Flags = passing[kinds]
    return allowed, cached[1][kinds]


def _excluded(columns: WorkerColumns, constraints: Constraints) -> list[int]:
    """The rows of the workers that the query leaves out by name, each once: the edge may name one that is saturated as well."""
    rows: dict[int, None] = {}
    for incarnation in constraints.exclude:
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
    """Return how many leading blocks each worker is expected to hold by now."""
    depths: I64 = np.zeros(len(columns.names), np.int64)
    for name, blocks in scoring.credited.items():
        row = columns.rows.get(name)
        if row is not None:
            depths[row] = blocks
    return depths
