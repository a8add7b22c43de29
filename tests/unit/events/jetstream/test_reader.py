"""Cutting what a cursor delivers where positions are missing: each one is a record, unreadable, or in a gap."""

import pytest

from headwater.events.jetstream.cursor import RawMessage, slices
from headwater.schemas.encoding import SCHEMA_VERSION, Batch, encode_batch
from headwater.schemas.events import LoadReported

DATA = encode_batch(Batch(SCHEMA_VERSION, "w", 1, 1, 0, (LoadReported(0, 0, 0, 1),)))


def _raw(position: int, data: bytes = DATA) -> RawMessage:
    return RawMessage(position, position, 100 - position, 0, "s", data, None)


@pytest.mark.parametrize(
    ("after", "positions", "expected"),
    [
        (0, [], []),
        (0, [1, 2], [(None, [1, 2], 98)]),
        (0, [3, 4], [((1, 2), [3, 4], 96)]),
        (0, [1, 4, 5, 9], [(None, [1], 99), ((2, 3), [4, 5], 95), ((6, 8), [9], 91)]),
        (2, [1, 2, 3], [(None, [3], 97)]),
        (5, [4, 5], []),
    ],
)
def test_holes_are_cut_out(
    after: int, positions: list[int], expected: list[tuple[tuple[int, int] | None, list[int], int]]
) -> None:
    """Each slice has the gap in front of it, its records, and the number of messages behind its last one."""
    told = [
        (piece.gap and (piece.gap.first, piece.gap.last), [r.position for r in piece.records], piece.lag)
        for piece in slices([_raw(position) for position in positions], after)
    ]
    assert told == expected


def test_unreadable_messages_are_no_holes() -> None:
    """They are named in the slice in which they stand."""
    (piece,) = slices([_raw(1), _raw(2, b"garbage"), _raw(3)], 0)
    assert [record.position for record in piece.records] == [1, 3]
    assert [one.position for one in piece.unreadable] == [2]
