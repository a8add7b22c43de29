"""Facts of a folded state that a condition can name, and which kinds of events each follows from."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final, Literal, NamedTuple

from headwater.router.fold.state import RouterState
from headwater.router.fold.worker import Worker
from headwater.schemas.subjects import PoolKind

Value = bool | int | float | str | tuple[str, ...] | None
"""None: unknown, as of a worker that is not there."""

Kind = Literal["number", "text", "truth", "names"]

FLEET: Final[frozenset[PoolKind]] = frozenset({"fleet"})
LOAD: Final[frozenset[PoolKind]] = frozenset({"fleet", "load"})
ROUTED: Final[frozenset[PoolKind]] = frozenset({"fleet", "load", "route"})
CACHE: Final[frozenset[PoolKind]] = frozenset({"fleet", "kv"})
CHAINS: Final[frozenset[PoolKind]] = frozenset({"fleet", "kv", "load"})

STATES: Final = ("ready", "draining", "paused", "sleeping", "absent")
ROLES: Final = ("both", "prefill", "decode", "encode")


class Fact(NamedTuple):
    """A fact of a worker. `kinds` are all that it follows from; `words` are what it can be, where that is known."""

    kind: Kind
    kinds: frozenset[PoolKind]
    read: Callable[[RouterState, Worker], Value]
    about: str
    words: tuple[str, ...] = ()


def state_of(worker: Worker) -> str:
    """Its state, in which draining shows however it was announced."""
    return "draining" if worker.draining and worker.state == "ready" else worker.state


WORKER: Final[dict[str, Fact]] = {
    "present": Fact("truth", FLEET, lambda _, worker: True, "is it in the pool?"),
    "state": Fact("text", FLEET, lambda _, worker: state_of(worker), f"one of {', '.join(STATES)}", STATES),
    "role": Fact("text", FLEET, lambda _, worker: worker.role, f"one of {', '.join(ROLES)}", ROLES),
    "engine": Fact("text", FLEET, lambda _, worker: worker.engine, "name of its engine"),
    "epoch": Fact("number", FLEET, lambda _, worker: worker.epoch, "number of its incarnation"),
    "adapters": Fact("names", FLEET, lambda _, worker: worker.loras, "loaded LoRA adapters"),
    "taints": Fact("names", FLEET, lambda _, worker: worker.taints, "its taints"),
    "total_blocks": Fact("number", LOAD, lambda _, worker: worker.total_blocks, "KV blocks of its engine"),
    "running": Fact("number", LOAD, lambda _, worker: worker.running, "requests that its engine runs"),
    "waiting": Fact("number", LOAD, lambda _, worker: worker.waiting, "requests that wait in its engine"),
    "used_blocks": Fact("number", LOAD, lambda _, worker: worker.used_blocks, "KV blocks in use"),
    "kv_used": Fact(
        "number",
        LOAD,
        lambda _, worker: worker.used_blocks / worker.total_blocks if worker.total_blocks else 0.0,
        "share of its KV blocks in use, 0 to 1",
    ),
    "requests": Fact(
        "number", ROUTED, lambda _, worker: len(worker.requests), "requests that were routed to it and run"
    ),
    "queued_tokens": Fact(
        "number", ROUTED, lambda _, worker: worker.prefill_tokens, "their prompt tokens yet to compute"
    ),
    "held_blocks": Fact("number", ROUTED, lambda _, worker: worker.decode_blocks, "blocks of their prompts"),
    "step_ms": Fact("number", ROUTED, lambda _, worker: worker.step_ms, "time between two tokens"),
    "cached_blocks": Fact(
        "number", CACHE, lambda state, worker: state.index.blocks.get(worker.name, 0), "blocks that it caches"
    ),
    "cold": Fact(
        "truth",
        CHAINS,
        lambda state, worker: worker.name in state.cold,
        "does its cache not count, for lost events?",
    ),
}
"""Of one worker: `worker("w1").waiting`."""

COUNTED: Final = ("ready", "draining", "paused", "sleeping")
"""`workers.ready`: how many are in this state."""

SUMMED: Final = tuple(
    name
    for name, fact in WORKER.items()
    if fact.kind == "number" and name not in ("epoch", "kv_used", "step_ms")
)
"""`workers.waiting`: the sum over all; any number has a largest and smallest: `workers.max("waiting")`."""

INDEX: Final[dict[str, Callable[[RouterState], int]]] = {
    "blocks": lambda state: state.index.rows,
    "refused": lambda state: state.index.refused,
}
"""`index.blocks`: distinct blocks that any worker caches; `index.refused`: those for which there was no room."""


Number = int | float


class Spread:
    """The smallest and largest of some values, which come and go one by one."""

    def __init__(self) -> None:
        self._counts: Counter[Number] = Counter()
        self._ends: tuple[Number, Number] | None = None

    def replace(self, old: Number | None, new: Number | None) -> None:
        """One value goes, or none, and another comes, or none."""
        if old == new:
            return
        if new is not None:
            self._counts[new] += 1
            if self._ends is not None:
                self._ends = min(self._ends[0], new), max(self._ends[1], new)
        if old is not None:
            self._counts[old] -= 1
            if not self._counts[old]:
                del self._counts[old]
                if self._ends is not None and old in self._ends:
                    self._ends = None

    def ends(self) -> tuple[Number, Number] | None:
        """The smallest and the largest; None without values."""
        if self._ends is None and self._counts:
            self._ends = min(self._counts), max(self._counts)
        return self._ends


class Totals:
    """Counts and sums over all workers, and largest and smallest values, kept up to date worker by worker."""

    def __init__(self, state: RouterState, sums: Iterable[str], extremes: Iterable[str]) -> None:
        self.states: dict[str, int] = dict.fromkeys(COUNTED, 0)
        self._state = state
        self._sums: dict[str, Number] = dict.fromkeys(sums, 0)
        self._spans = {name: Spread() for name in extremes}
        self._names = {*self._sums, *self._spans}
        self._known: dict[str, dict[str, Number]] = {}
        self._state_of: dict[str, str] = {}
        for name in state.loads.workers:
            self.touch(name)

    def touch(self, name: str) -> None:
        """A worker may have changed, come or gone."""
        worker = self._state.loads.workers.get(name)
        before, old = self._state_of.pop(name, ""), self._known.pop(name, {})
        if before:
            self.states[before] -= 1
        new: dict[str, Number] = {}
        if worker is not None:
            now = self._state_of[name] = state_of(worker)
            self.states[now] += 1
            new = self._known[name] = {fact: self._number(worker, fact) for fact in self._names}
        for fact in self._sums:
            self._sums[fact] += new.get(fact, 0) - old.get(fact, 0)
        for fact, span in self._spans.items():
            span.replace(old.get(fact), new.get(fact))

    def _number(self, worker: Worker, fact: str) -> Number:
        found = WORKER[fact].read(self._state, worker)
        assert isinstance(found, int | float)
        return found

    def total(self, fact: str) -> Number:
        """The sum of a fact over all workers."""
        return self._sums[fact]

    def extreme(self, fact: str, which: Literal["min", "max"]) -> Number | None:
        """The smallest or largest value; None without workers."""
        ends = self._spans[fact].ends()
        return None if ends is None else ends[which == "max"]
