"""The checker of histories finds each kind of broken promise, and nothing in a history without one."""

import pytest

from headwater.events.ports import Gap, Record, Slice, Unreadable
from headwater.schemas.encoding import SCHEMA_VERSION, Batch, LogEvent
from tests.durability.history import Key, Kind, Life, LogContent, check, marked

KEY = Key("s", "w", 1)

Stored = list[tuple[int, int, list[int]]]
"""Epoch, batch number and event ids of each message, in log order."""


def _batch(epoch: int, seq: int, events: list[int]) -> Batch[LogEvent]:
    return Batch(SCHEMA_VERSION, "w", epoch, seq, 0, tuple(marked(event) for event in events))


def _content(stored: Stored) -> LogContent:
    content = LogContent()
    for position, message in enumerate(stored, 1):
        content.add(position, "s", _batch(*message))
    return content


def _life(told: dict[int, int | str], key: Key = KEY) -> Life:
    """Events with the position each was told to have, or how else it ended; "pending" did not end."""
    life = Life(key)
    for event, end in told.items():
        life.invoke(event)
        if isinstance(end, int):
            life.ok(event, end)
        elif end == "fenced":
            life.fenced(event)
        elif end == "unknown":
            life.unknown(event)
    return life


GOOD: Stored = [(1, 1, [1, 2]), (1, 2, [3])]
TOLD: dict[int, int | str] = {1: 1, 2: 1, 3: 2}


def test_kept_promises_are_no_violations() -> None:
    """Events that ended as unknown or fenced may be there or not; a repeated batch does not count."""
    assert not check([_life(TOLD)], _content(GOOD))
    assert not check([_life(TOLD | {4: "unknown"})], _content(GOOD))
    assert not check([_life({1: 1, 2: 1, 3: "unknown"})], _content(GOOD))
    assert not check([_life({1: 1, 2: 1, 3: "fenced"})], _content(GOOD))
    repeated = _content([*GOOD, (1, 2, [3])])
    assert not check([_life(TOLD)], repeated)
    assert repeated.repeated_batches == 1


def test_next_life_takes_over() -> None:
    """Each life has its own history; the higher epoch stands behind the lower."""
    lives = [_life(TOLD), _life({1: 3}, Key("s", "w", 2))]
    assert not check(lives, _content([*GOOD, (2, 1, [1])]))


@pytest.mark.parametrize(
    ("kind", "told", "stored"),
    [
        ("lost", TOLD | {4: 3}, GOOD),
        ("misplaced", TOLD | {3: 1}, GOOD),
        ("duplicate", TOLD, [*GOOD, (1, 3, [3])]),
        ("phantom", TOLD, [*GOOD, (1, 3, [9])]),
        ("phantom", TOLD, [*GOOD, (2, 1, [1])]),
        ("reordered", {1: 1, 2: 1, 3: 1}, [(1, 1, [1, 3, 2])]),
        ("hole", {1: 1, 2: "unknown", 3: 2}, [(1, 1, [1]), (1, 2, [3])]),
        ("hole", TOLD, [(1, 1, [1, 2]), (1, 3, [3])]),
        ("fenced", TOLD, [(1, 1, [1, 2]), (2, 1, [9]), (1, 2, [3])]),
        ("pending", TOLD | {4: "pending"}, GOOD),
    ],
)
def test_broken_promise_is_found(kind: Kind, told: dict[int, int | str], stored: Stored) -> None:
    """Each kind by its name."""
    assert kind in {one.what for one in check([_life(told)], _content(stored))}


def test_pending_is_no_violation_before_the_run_has_settled() -> None:
    """A history may be looked at in between."""
    assert not check([_life(TOLD | {4: "pending"})], _content(GOOD), settled=False)


def _slice(
    positions: list[int], gap: tuple[int, int] | None = None, unreadable: list[int] | None = None
) -> Slice:
    return Slice(
        [Record(position, "s", 0, _batch(1, position, [position])) for position in positions],
        0,
        Gap(*gap, "purged") if gap else None,
        tuple(Unreadable(position, "s", "garbage") for position in unreadable or []),
    )


@pytest.mark.parametrize(
    ("slices", "silent"),
    [
        ([_slice([1, 2]), _slice([3])], 0),
        ([_slice([1, 2]), _slice([6], gap=(3, 5))], 0),
        ([_slice([1, 4], unreadable=[2, 3]), _slice([5], unreadable=[6])], 0),
        ([_slice([1, 2]), _slice([4])], 1),
        ([_slice([1, 2, 5])], 1),
        ([_slice([1, 2]), _slice([6], gap=(3, 4))], 1),
        ([_slice([1, 2]), _slice([6], gap=(2, 5))], 1),
        ([_slice([1, 2]), _slice([2, 3])], 1),
    ],
)
def test_positions_passed_over_in_silence_are_found(slices: list[Slice], silent: int) -> None:
    """Every position is a record, unreadable, or in a declared gap, and that once."""
    content = LogContent()
    for piece in slices:
        content.add_slice(piece)
    unread = [one for one in content.violations() if one.what == "unread"]
    assert sum(one.cases for one in unread) == silent
