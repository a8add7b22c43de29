"""Conditions on a folded state, such as `worker("w3").cached_blocks < 100 and workers.ready >= 4`, and the facts that they can name.

Each fact says which kinds of events it follows from. The text is parsed as a Python expression and translated, node by node, into functions;
only the nodes that are listed here are taken, and nothing is evaluated as Python. A comparison with an unknown value, such as a fact of a
worker that is not in the pool, does not hold; the state of such a worker is "absent".
"""

import ast
import difflib
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Literal, NamedTuple

from headwater.ops.config.setting import ConfigError
from headwater.router.state import RouterState
from headwater.router.worker import Worker, state_of
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
        number = WORKER[fact].read(self._state, worker)
        assert isinstance(number, int | float)
        return number

    def total(self, fact: str) -> Number:
        """The sum of a fact over all workers."""
        return self._sums[fact]

    def extreme(self, fact: str, which: Literal["min", "max"]) -> Number | None:
        """The smallest or largest value; None without workers."""
        ends = self._spans[fact].ends()
        return None if ends is None else ends[which == "max"]


Read = Callable[[RouterState, Totals], Value]
Evaluate = Callable[[tuple[Value, ...]], Value]

NUMERIC: Final = tuple(name for name, fact in WORKER.items() if fact.kind == "number")

COMPARE: Final[dict[type[ast.cmpop], Callable[[Any, Any], bool]]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.In: lambda one, several: one in several,
    ast.NotIn: lambda one, several: one not in several,
}
ORDERED: Final = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
CALCULATE: Final[dict[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}


ROOTS: Final = ("worker", "workers", "index")
FORMS: Final = (
    'worker("NAME").FACT',
    "workers.FACT",
    'workers.max("FACT")',
    'workers.min("FACT")',
    "index.FACT",
)


OF_ABSENT: Final[dict[str, Value]] = {"present": False, "state": "absent"}
"""Facts of a worker that is not in the pool; the others are unknown."""


class Term(NamedTuple):
    """A fact that a condition names, and how it is read. `worker` is "" for one of all workers."""

    text: str
    worker: str
    kinds: frozenset[PoolKind]
    read: Read


class Predicate(NamedTuple):
    """A condition: the facts that it names, and whether it holds for their values.

    `sums` and `extremes` are facts of which totals are needed.
    """

    text: str
    terms: tuple[Term, ...]
    evaluate: Evaluate
    sums: frozenset[str]
    extremes: frozenset[str]

    @property
    def kinds(self) -> frozenset[PoolKind]:
        """The kinds of events that it depends on."""
        return frozenset().union(*[term.kinds for term in self.terms])

    @property
    def workers(self) -> frozenset[str] | None:
        """The only workers that it depends on; None for all."""
        return _named(self.terms)

    def workers_of(self, kind: PoolKind) -> frozenset[str] | None:
        """The only workers whose events of a kind it depends on; None for all."""
        return _named([term for term in self.terms if kind in term.kinds])

    def holds(self, values: tuple[Value, ...]) -> bool:
        """Does it hold for these values of its terms?"""
        return bool(self.evaluate(values))


def _named(terms: Sequence[Term]) -> frozenset[str] | None:
    return None if any(not term.worker for term in terms) else frozenset(term.worker for term in terms)


class _Part(NamedTuple):
    """A translated node: its kind, its function, and the words that it can be, where they are known."""

    kind: Kind
    evaluate: Evaluate
    words: tuple[str, ...] = ()


def parse(text: str) -> Predicate:
    """The condition of a text. Raises `ConfigError`, which names the wrong word."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        where = f" at character {error.offset}" if isinstance(error, SyntaxError) and error.offset else ""
        raise ConfigError(
            f'--when {text}: this is no condition{where}; one is worker("w1").waiting > 10 and workers.ready < 4'
        ) from error
    builder = _Builder(text)
    part = builder.truth(tree.body)
    if not builder.terms:
        raise builder.error(tree.body, "names no fact of the state, so it never changes")
    return Predicate(
        text.strip(),
        tuple(builder.terms.values()),
        part.evaluate,
        frozenset(builder.sums),
        frozenset(builder.extremes),
    )


class _Builder:
    """Translates the nodes of one condition."""

    def __init__(self, text: str) -> None:
        self.terms: dict[str, Term] = {}
        self.sums: set[str] = set()
        self.extremes: set[str] = set()
        self._text = text

    def error(self, node: ast.AST, reason: str) -> ConfigError:
        """The error about a part of the condition."""
        return ConfigError(f"--when: {ast.unparse(node)} {reason}")

    def truth(self, node: ast.expr) -> _Part:
        """A part that must be true or false."""
        part = self.part(node)
        if part.kind != "truth":
            fix = f'{ast.unparse(node)} == "…"' if part.kind == "text" else f"{ast.unparse(node)} < 4"
            raise self.error(node, f"is a {part.kind}, not a condition: compare it, as in {fix}")
        return part

    def part(self, node: ast.expr) -> _Part:
        """Any part."""
        match node:
            case ast.Constant(value=value) if isinstance(value, bool | int | float | str):
                kind: Kind = (
                    "truth" if isinstance(value, bool) else "text" if isinstance(value, str) else "number"
                )
                return _Part(kind, lambda _: value, (value,) if isinstance(value, str) else ())
            case ast.Tuple(elts=several) | ast.List(elts=several) | ast.Set(elts=several):
                return self._names(node, several)
            case ast.BoolOp():
                return self._all_or_any(node)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                inner = self.truth(operand).evaluate
                return _Part("truth", lambda values: not inner(values))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                negated = self._number(operand)
                return _Part("number", lambda values: _negative(negated(values)))
            case ast.BinOp(op=op, left=left, right=right) if type(op) in CALCULATE:
                return _Part(
                    "number", _calculated(CALCULATE[type(op)], self._number(left), self._number(right))
                )
            case ast.Compare():
                return self._comparison(node)
            case ast.Attribute() | ast.Call() | ast.Name():
                return self._fact(node)
            case _:
                raise self.error(
                    node, "is not taken here: facts, numbers, texts, comparisons, and, or, not, + - * / % are"
                )

    def _names(self, node: ast.expr, several: list[ast.expr]) -> _Part:
        parts = [self.part(element) for element in several]
        if any(part.kind != "text" or not part.words for part in parts):
            raise self.error(node, "must be a list of texts")
        words = tuple(part.words[0] for part in parts)
        return _Part("names", lambda _: words, words)

    def _all_or_any(self, node: ast.BoolOp) -> _Part:
        parts = [self.truth(operand).evaluate for operand in node.values]
        if isinstance(node.op, ast.And):
            return _Part("truth", lambda values: all(part(values) for part in parts))
        return _Part("truth", lambda values: any(part(values) for part in parts))

    def _number(self, node: ast.expr) -> Evaluate:
        part = self.part(node)
        if part.kind != "number":
            raise self.error(node, f"is a {part.kind}, and one can only calculate with numbers")
        return part.evaluate

    def _comparison(self, node: ast.Compare) -> _Part:
        nodes = [node.left, *node.comparators]
        parts = [self.part(operand) for operand in nodes]
        steps = []
        for op, left, right, at in zip(node.ops, parts, parts[1:], nodes, strict=False):
            if type(op) not in COMPARE:
                raise self.error(node, "compares with `is`: use ==")
            self._check(node, op, left, right, at)
            steps.append((COMPARE[type(op)], left.evaluate, right.evaluate))
        return _Part("truth", lambda values: all(_compared(*step, values) for step in steps))

    def _check(self, node: ast.Compare, op: ast.cmpop, left: _Part, right: _Part, at: ast.expr) -> None:
        """Raise an error for a comparison that can never hold, or not be made."""
        expected = "names" if isinstance(op, ast.In | ast.NotIn) else left.kind
        if right.kind != expected or (expected == "names" and left.kind != "text"):
            raise self.error(node, f"compares a {left.kind} with a {right.kind}")
        if isinstance(op, ORDERED) and left.kind != "number":
            raise self.error(node, f"orders a {left.kind}: use == or !=")
        for part, other in ((left, right), (right, left)):
            if len(part.words) > 1 and part.kind == "text":
                for word in other.words:
                    if word not in part.words:
                        raise self.error(
                            node,
                            f"compares with what it cannot be: {_suggest(word, part.words, 'it is one of')}",
                        )

    def _fact(self, node: ast.expr) -> _Part:
        match node:
            case ast.Attribute(
                value=ast.Call(func=ast.Name(id="worker"), args=[ast.Constant(value=str(name))], keywords=[]),
                attr=fact,
            ):
                return self._of_worker(node, name, fact)
            case ast.Attribute(value=ast.Name(id="workers"), attr=fact):
                return self._of_all(node, fact)
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="workers"), attr=("min" | "max") as which),
                args=[ast.Constant(value=str(fact))],
                keywords=[],
            ):
                return self._extreme(node, "max" if which == "max" else "min", fact)
            case ast.Attribute(value=ast.Name(id="index"), attr=fact):
                if fact not in INDEX:
                    raise self.error(node, f"is not known: {_suggest(fact, INDEX, 'of the index there are')}")
                read = INDEX[fact]
                return self._term(
                    node, "number", "", WORKER["cached_blocks"].kinds, lambda state, _: read(state)
                )
            case _:
                roots = [child.id for child in ast.walk(node) if isinstance(child, ast.Name)]
                unknown = [name for name in roots if name not in ROOTS]
                fix = "write " + ", ".join(FORMS)
                if unknown and difflib.get_close_matches(unknown[0], ROOTS):
                    fix = _suggest(unknown[0], ROOTS, "")
                raise self.error(node, f"is not known: {fix}")

    def _of_worker(self, node: ast.expr, name: str, fact: str) -> _Part:
        definition = WORKER.get(fact)
        if definition is None:
            raise self.error(node, f"is not known: {_suggest(fact, WORKER, 'facts of a worker are')}")
        absent = OF_ABSENT.get(fact)

        def read(state: RouterState, _: Totals) -> Value:
            worker = state.loads.workers.get(name)
            return absent if worker is None else definition.read(state, worker)

        part = self._term(node, definition.kind, name, definition.kinds, read)
        return part._replace(words=definition.words)

    def _of_all(self, node: ast.expr, fact: str) -> _Part:
        fleet = WORKER["present"].kinds
        if fact == "total":
            return self._term(node, "number", "", fleet, lambda state, _: len(state.loads.workers))
        if fact in COUNTED:
            return self._term(node, "number", "", fleet, lambda _, totals: totals.states[fact])
        if fact in SUMMED:
            self.sums.add(fact)
            return self._term(node, "number", "", WORKER[fact].kinds, lambda _, totals: totals.total(fact))
        raise self.error(
            node, f"is not known: {_suggest(fact, ('total', *COUNTED, *SUMMED), 'facts of all workers are')}"
        )

    def _extreme(self, node: ast.expr, which: Literal["min", "max"], fact: str) -> _Part:
        if fact not in NUMERIC:
            raise self.error(node, f"is not known: {_suggest(fact, NUMERIC, 'numbers of a worker are')}")
        self.extremes.add(fact)
        return self._term(
            node, "number", "", WORKER[fact].kinds, lambda _, totals: totals.extreme(fact, which)
        )

    def _term(self, node: ast.expr, kind: Kind, worker: str, kinds: frozenset[PoolKind], read: Read) -> _Part:
        text = ast.unparse(node).replace("'", '"')
        self.terms.setdefault(text, Term(text, worker, kinds, read))
        at = list(self.terms).index(text)
        return _Part(kind, lambda values: values[at])


def _compared(
    compare: Callable[[Any, Any], bool], left: Evaluate, right: Evaluate, values: tuple[Value, ...]
) -> bool:
    left_value, other = left(values), right(values)
    return left_value is not None and other is not None and compare(left_value, other)


def _calculated(calculate: Callable[[Any, Any], Any], left: Evaluate, right: Evaluate) -> Evaluate:
    def result(values: tuple[Value, ...]) -> Value:
        left_value, other = left(values), right(values)
        if left_value is None or other is None:
            return None
        try:
            return float(calculate(left_value, other))
        except (ZeroDivisionError, OverflowError):
            return None

    return result


def _negative(value: Any) -> Value:
    return None if value is None else -float(value)


def _suggest(word: str, choices: Iterable[str], title: str) -> str:
    names = list(choices)
    near = difflib.get_close_matches(word, names, n=1)
    return f"did you mean {near[0]}?" if near else f"{title} {', '.join(names)}"
