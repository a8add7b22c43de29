"""Strategies and builders that several tests share: any event of ours, and short ways to write one."""

from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
from hypothesis import strategies as st

from headwater.events.ports import Record
from headwater.schemas.encoding import SCHEMA_VERSION, Batch, LogEvent
from headwater.schemas.events import Event, WorkerJoined
from headwater.schemas.hashing import U64, pack_hashes
from headwater.schemas.routing import Candidate, Decision
from tests.support.worlds.clock import WALL_NS

U64_MAX = (1 << 64) - 1
EVENT_TYPES: tuple[type[Event], ...] = get_args(LogEvent)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
hashes = st.lists(st.integers(1, U64_MAX), max_size=4).map(lambda names: packed(*names))
_plain: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(0, U64_MAX) | st.integers(0, 300),
    str: texts,
    bool: st.booleans(),
    float: st.floats(allow_nan=False),
    bytes: st.binary(max_size=24),
    NoneType: st.none(),
}


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a field's type, within the bounds that it states."""
    if kind in _plain:
        return _plain[kind]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        [bounds] = arguments[1:]
        assert arguments[0] is int, f"no strategy for {kind}"
        assert (bounds.gt, bounds.lt) == (None, None), f"no strategy for {kind}"
        return st.integers(bounds.ge or 0, U64_MAX if bounds.le is None else bounds.le)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (Union, UnionType):
        return st.one_of([values(one) for one in arguments])
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, arguments))
    if origin is dict:
        return st.dictionaries(*map(values, arguments), max_size=3)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return structs(kind)
    raise AssertionError(f"no strategy for {kind}")


def structs(kind: type[Any]) -> st.SearchStrategy[Any]:
    """Any value of a struct type."""
    hints = get_type_hints(kind, include_extras=True)
    fields = {name: values(hints[name]) for name in kind.__struct_fields__}
    if "hashes" in fields:
        fields["hashes"] = hashes
    if kind is not Decision:
        return st.builds(kind, **fields)
    # Its worker is one of its candidates.
    some = st.lists(structs(Candidate), min_size=1, max_size=3).map(tuple)
    return some.flatmap(
        lambda candidates: st.builds(
            kind, **{**fields, "candidates": st.just(candidates), "worker": st.just(candidates[-1].worker)}
        )
    )


def any_event() -> st.SearchStrategy[Event]:
    """Any event of any type that the log can hold."""
    return st.one_of([structs(kind) for kind in EVENT_TYPES])


def batch(
    *events: Event,
    writer: str = "w1",
    epoch: int = 1,
    seq: int = 1,
    wall_ns: int = WALL_NS,
    version: int = SCHEMA_VERSION,
) -> Batch[Any]:
    """A batch as its writer would append it, not sealed yet."""
    return Batch(version, writer, epoch, seq, wall_ns, events)


def record(
    position: int, *events: Event, writer: str = "w1", epoch: int = 1, wall_ns: int = WALL_NS, age_ns: int = 0
) -> Record:
    """A log message as a reader gets it, stored `age_ns` after its writer's time."""
    return Record(
        position,
        "hw.test.pool.p.kv.w",
        wall_ns + age_ns,
        batch(*events, writer=writer, epoch=epoch, wall_ns=wall_ns),
    )


def joined(
    worker: str = "w1", epoch: int = 1, *, block_size: int = 16, total_blocks: int = 1000
) -> WorkerJoined:
    """A worker of the simulated engine joins."""
    return WorkerJoined(worker, epoch, "m", "sim", "both", block_size, total_blocks, 256)


def keys(*numbers: int) -> U64:
    """Block names as an array."""
    return np.array(numbers, np.uint64)


def packed(*numbers: int) -> bytes:
    """Block names as events carry them."""
    return pack_hashes(keys(*numbers))
