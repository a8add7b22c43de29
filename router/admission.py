"""The admission queue: it holds queries while every worker that could take them is saturated. Router and what-if share it.

Pure apart from its `Router`, which decides; time is passed in.

    offer      decide a query at once, queue it, or refuse it
    advance    serve queued queries that can have a worker now, in the queue's order
    expire     refuse those that reached the maximum time, or whose deadline can no longer be met
    remove     discard one whose client is gone

Saturated workers are added to the decision's `exclude`, so that the decision can be recomputed from its record.
"""

from collections.abc import Callable, Sequence, Set
from typing import Final, NamedTuple, Protocol

import msgspec
import numpy as np

from headwater.router.candidates import allows
from headwater.router.load import Loads
from headwater.router.queue import (
    BusyLimits,
    PlacementKey,
    QueuedQuery,
    QueueSettings,
    Rejection,
    WaitingQueue,
)
from headwater.router.state import RouterState
from headwater.router.worker import Traits, Worker
from headwater.schemas.routing import Constraints, Decision, RouteQuery, RouteRefused

Choose = Callable[[RouteQuery], Decision | RouteRefused]
"""Decides a query on the present state and changes nothing."""


class Saturated(NamedTuple):
    """Every worker that could take the query is saturated. `fallback` is the decision with saturation ignored.

    `workers` are the saturated incarnations that could take it, or more.
    """

    fallback: Decision
    workers: frozenset[str] = frozenset()


Verdict = Decision | RouteRefused | Saturated


def find_placement(choose: Choose, loads: Loads, query: RouteQuery, saturated: Sequence[str]) -> Verdict:
    """Decide among the workers that are not `saturated` (as `exclude` lists them), if there are any."""
    narrowed: Decision | RouteRefused | None = None
    if saturated and not LoadSnapshot.of(loads).all_in(set(saturated)):
        constraints = query.constraints
        rest = msgspec.structs.replace(constraints, exclude=(*constraints.exclude, *saturated))
        narrowed = choose(msgspec.structs.replace(query, constraints=rest))
        if isinstance(narrowed, Decision) and not _decodes_on_prefill_worker(loads, narrowed):
            return narrowed
    unrestricted = choose(query)
    if isinstance(unrestricted, RouteRefused) or not saturated:
        return unrestricted
    if isinstance(narrowed, Decision) and _decodes_on_prefill_worker(loads, unrestricted):
        # Then there is no decode worker at all.
        return narrowed
    return Saturated(unrestricted, _passing(loads, query.constraints, saturated))


def _passing(loads: Loads, constraints: Constraints, incarnations: Sequence[str]) -> frozenset[str]:
    """Return those of the incarnations that pass the filters."""
    if constraints.pinned:
        return frozenset(
            incarnation
            for incarnation in incarnations
            if incarnation.rpartition(".")[0] == constraints.pinned
        )
    passing: dict[Traits, bool] = {}
    allowed: list[str] = []
    for incarnation in incarnations:
        worker = loads.workers.get(incarnation.rpartition(".")[0])
        if worker is None:
            continue
        traits = worker.traits
        if traits not in passing:
            passing[traits] = allows(traits, constraints)
        if passing[traits]:
            allowed.append(incarnation)
    return frozenset(allowed)


class LoadSnapshot(NamedTuple):
    """The workers that take requests, and a fingerprint of what filters see of them."""

    ready: frozenset[str]
    fingerprint: int

    @classmethod
    def of(cls, loads: Loads) -> "LoadSnapshot":
        """Return a snapshot of the fold's present loads."""
        ready = [worker for worker in loads.workers.values() if worker.takes_requests]
        seen = tuple(
            (worker.name, worker.epoch, worker.role, worker.loras, worker.taints) for worker in ready
        )
        fingerprint = hash(
            (seen, tuple(loads.engine_weights.items()), tuple(loads.shares("revision").items()))
        )
        return cls(frozenset(f"{worker.name}.{worker.epoch}" for worker in ready), fingerprint)

    def all_in(self, saturated: Set[str]) -> bool:
        """Are there workers that take requests, and are all of them saturated? Then nothing needs to be decided."""
        return bool(self.ready) and self.ready <= saturated


class BlockedKey(NamedTuple):
    """Why queries of one placement key were not placed: with this fingerprint, all that could take them were among these saturated `workers`."""

    fingerprint: int
    workers: frozenset[str]

    @classmethod
    def of(cls, snapshot: LoadSnapshot, verdict: Saturated) -> "BlockedKey":
        """Return the key from a verdict on that snapshot."""
        return cls(snapshot.fingerprint, verdict.workers)

    def still_blocks(self, snapshot: LoadSnapshot, saturated: Set[str]) -> bool:
        """Is the key known to be blocked still, without deciding again?"""
        return snapshot.fingerprint == self.fingerprint and self.workers <= saturated


def uncached_tokens(decision: Decision, loads: Loads) -> int:
    """Prompt tokens to compute at the candidate that caches most of the prompt."""
    cached = max(
        (candidate.cached_blocks + candidate.lower_blocks) * loads.workers[candidate.worker].block_size
        for candidate in decision.candidates
    )
    return max(0, decision.prompt_tokens - cached)


def first_token_s(decision: Decision, *, queued: bool) -> float:
    """The lowest estimate of the time to the first token, with or without what workers have `queued`; 0: unknown."""
    least_ms = min(
        candidate.prefill_ms + candidate.transfer_ms + (candidate.queue_ms if queued else 0.0)
        for candidate in decision.candidates
    )
    return least_ms / 1_000.0


def _decodes_on_prefill_worker(loads: Loads, decision: Decision) -> bool:
    """Would a prefill worker also decode, perhaps only because the decode workers were left out?"""
    return not decision.leg and loads.workers[decision.worker].role == "prefill"


# Saturation, and the queue.

UNACCEPTED_NS_MAX: Final = 5_000_000_000
"""A decision that its worker has not accepted for this long no longer saturates it: its answer was lost, or its edge died.
Workers accept within a fraction of this. Cost comparisons count the decision longer (`router.worker`)."""


def is_saturated(worker: Worker, now_ns: int, limits: BusyLimits) -> bool:
    """Is the worker above a limit?"""
    if limits.waiting and worker.waiting > limits.waiting:
        return True
    most_tokens, most_blocks = limits.prefill_tokens, limits.kv * worker.total_blocks
    if not _above(worker.prefill_tokens, most_tokens) and not _above(worker.decode_blocks, most_blocks):
        # The common case: the sums below are never larger than these.
        return False
    tokens, blocks = worker.promised_within(now_ns, UNACCEPTED_NS_MAX)
    return _above(tokens, most_tokens) or _above(blocks, most_blocks)


def _above(amount: int, limit: float) -> bool:
    return bool(limit) and amount > limit


def saturated_workers(loads: Loads, now_ns: int, limits: BusyLimits) -> tuple[str, ...]:
    """The saturated incarnations, sorted, as `Constraints.exclude` lists them."""
    if not any(limits):
        return ()
    columns = loads.columns
    columns.refresh()
    table = columns.table
    # The sums of some requests are never larger than those of all, so this leaves out no saturated worker.
    above = np.zeros(len(table), np.bool_)
    if limits.waiting:
        above |= table["waiting"] > limits.waiting
    if limits.prefill_tokens:
        above |= table["prefill_tokens"] > limits.prefill_tokens
    if limits.kv:
        above |= table["decode_blocks"] > limits.kv * table["total_blocks"]
    suspects = [columns.workers[row] for row in above.nonzero()[0].tolist()]
    saturated = [worker for worker in suspects if is_saturated(worker, now_ns, limits)]
    return tuple(sorted(f"{worker.name}.{worker.epoch}" for worker in saturated))


SILENCE_S: Final = 3.0
"""Workers report their load once a second. If the fold has not advanced for this long no worker counts as saturated."""

BLOCKED_MAX: Final = 1_024
"""Placement keys remembered as blocked."""


class Now(NamedTuple):
    """The caller's time: `monotonic_s` for the queue, `wall_ns` for estimates."""

    monotonic_s: float
    wall_ns: int


class Router(Protocol):
    """What the queue needs of a router."""

    @property
    def state(self) -> RouterState:
        """The fold."""
        ...

    def choose(self, query: RouteQuery) -> Decision | RouteRefused:
        """Decide on the present state and change nothing."""
        ...

    def commit(self, decision: Decision) -> Decision:
        """Apply a decision that was just chosen."""
        ...


class Offered(NamedTuple):
    """The outcome of an offer: a decision, a refusal (with `reason` if the queue refused), or None: it is queued.

    `displaced` are less urgent queries that left a full queue for it.
    """

    reply: Decision | RouteRefused | None
    reason: str = ""
    displaced: tuple["Released", ...] = ()


class Released(NamedTuple):
    """A query that left the queue; `reason` is empty if it was served."""

    queued: QueuedQuery
    reply: Decision | RouteRefused
    reason: str = ""


class AdmissionQueue:
    """The admission queue of one router."""

    def __init__(self, settings: QueueSettings, router: Router, now: Now) -> None:
        self.waiting = WaitingQueue(settings.limits)
        self._limits = settings.busy
        self._router = router
        self._blocked: dict[PlacementKey, BlockedKey] = {}
        self._fold_advanced_s = now.monotonic_s

    def note_fold_advanced(self, now: Now) -> None:
        """The fold has read something from the log."""
        self._fold_advanced_s = now.monotonic_s

    def is_silent(self, now: Now) -> bool:
        """Has the fold not advanced for so long that no worker counts as saturated?"""
        return now.monotonic_s - self._fold_advanced_s > SILENCE_S

    def saturated_workers(self, now: Now) -> tuple[str, ...]:
        """Incarnations of workers that are saturated."""
        if self.is_silent(now):
            return ()
        return saturated_workers(self._router.state.loads, now.wall_ns, self._limits)

    def offer(self, query: RouteQuery, now: Now) -> Offered:
        """Decide a query at once, queue it, or refuse it."""
        verdict: Verdict
        if query.flow.waits and self.waiting.has_key(query.constraints):
            # Queries with equal constraints are queued: no worker could take this one, and it must not overtake them.
            verdict = self._router.choose(query)
            verdict = Saturated(verdict) if isinstance(verdict, Decision) else verdict
        else:
            verdict = self._find_placement(query, self.saturated_workers(now))
        if isinstance(verdict, Saturated):
            if query.flow.waits:
                return self._enqueue(query, verdict.fallback, now)
            verdict = verdict.fallback
        if isinstance(verdict, RouteRefused):
            return Offered(verdict)
        late = self._check_deadline(query, verdict, 0.0)
        if late is not None:
            return Offered(late.refused, late.reason)
        return Offered(self._router.commit(verdict))

    def advance(self, now: Now, served_max: int) -> tuple[list[Released], bool]:
        """Serve queued queries in order, at most `served_max`; True if more might be served."""
        released: list[Released] = []
        if not self.waiting:
            return released, False
        snapshot, saturated = LoadSnapshot.of(self._router.state.loads), self.saturated_workers(now)
        if len(self._blocked) > BLOCKED_MAX:
            self._blocked.clear()
        blocked: set[PlacementKey] = set()
        while len(released) < served_max:
            queued = None if snapshot.all_in(set(saturated)) else self.waiting.next_query(blocked)
            if queued is None:
                return released, False
            blocked_key = self._blocked.get(queued.key)
            if blocked_key is not None and blocked_key.still_blocks(snapshot, set(saturated)):
                blocked.add(queued.key)
                continue
            verdict = self._find_placement(queued.query, saturated)
            if isinstance(verdict, Saturated):
                blocked.add(queued.key)
                self._blocked[queued.key] = BlockedKey.of(snapshot, verdict)
                continue
            released.append(self._release(queued, verdict, now))
            saturated = self.saturated_workers(now)
        return released, True

    def expire(self, now: Now) -> list[Released]:
        """Refuse queries whose deadline can no longer be met, or that reached the maximum time."""
        expired = self.waiting.find_expired(now.monotonic_s)
        released = [Released(entry, rejected.refused, rejected.reason) for entry, rejected in expired]
        for entry in released:
            self.remove(entry.queued.query.request, now)
        return released

    def remove(self, request: str, now: Now) -> None:
        """Discard a query without serving it."""
        self.waiting.remove(request, now.monotonic_s)

    def _release(self, queued: QueuedQuery, verdict: Decision | RouteRefused, now: Now) -> Released:
        waited_s = now.monotonic_s - queued.arrived_s
        if isinstance(verdict, RouteRefused):
            # The workers that could have taken it left. As for any query, the edge decides how often it retries.
            self.remove(queued.query.request, now)
            return Released(queued, verdict, "no_worker")
        late = self._check_deadline(queued.query, verdict, waited_s)
        if late is not None:
            self.remove(queued.query.request, now)
            return Released(queued, late.refused, late.reason)
        self.waiting.serve(queued, now.monotonic_s)
        decision = msgspec.structs.replace(verdict, waited_ms=max(1, round(waited_s * 1_000)))
        return Released(queued, self._router.commit(decision))

    def _find_placement(self, query: RouteQuery, saturated: tuple[str, ...]) -> Verdict:
        return find_placement(self._router.choose, self._router.state.loads, query, saturated)

    def _check_deadline(self, query: RouteQuery, decision: Decision, waited_s: float) -> Rejection | None:
        deadline_ms = query.flow.deadline_ms
        serve_s = first_token_s(decision, queued=True)
        if not deadline_ms or waited_s + serve_s <= deadline_ms / 1_000.0:
            return None
        return self.waiting.reject_deadline(query, 0.0, serve_s, waited_s)

    def _enqueue(self, query: RouteQuery, fallback: Decision, now: Now) -> Offered:
        queued = self.waiting.admit(
            query,
            now.monotonic_s,
            uncached_tokens=uncached_tokens(fallback, self._router.state.loads),
            serve_s=first_token_s(fallback, queued=False),
        )
        if isinstance(queued, Rejection):
            return Offered(queued.refused, queued.reason)
        displaced = (
            Released(displaced_query, rejected.refused, rejected.reason)
            for displaced_query, rejected in queued.displaced
        )
        return Offered(None, displaced=tuple(displaced))
