"""Whether a stream is still the one that was read, by what servers say that were cut off for a while."""

import asyncio
from typing import Any, cast

import pytest
from nats.aio.client import Client

from headwater.events.jetstream import cursor
from headwater.events.jetstream.cursor import SHORTER_S, Cursor, RawMessage, StreamReplaced, _Lost, slices
from headwater.schemas.encoding import SCHEMA_VERSION, Batch, encode_batch
from headwater.schemas.events import LoadReported

AFTER = 100


def reading(monkeypatch: pytest.MonkeyPatch, info: dict[str, Any]) -> Cursor:
    """A cursor that was open before, of a stream whose information is `info`."""

    async def answer(*_: object) -> dict[str, Any]:
        return info

    monkeypatch.setattr(cursor, "stream_info", answer)
    made = Cursor(cast(Client, None), "S")
    made.opened = 1
    return made


def told(last: int, *, replicas: int = 3, created: str = "t0") -> dict[str, Any]:
    """STREAM.INFO."""
    return {"created": created, "state": {"last_seq": last}, "config": {"num_replicas": replicas}}


async def test_a_server_that_lags_behind_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was cut off answers for a stream with replicas from what it has; only for so long, and no longer once another one answered."""
    loop = asyncio.get_running_loop()
    now_s = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now_s)
    info = told(AFTER)
    made = reading(monkeypatch, info)
    for _ in range(2):
        info["state"]["last_seq"] = 0
        with pytest.raises(_Lost, match=f"ends at 0, and {AFTER} was read"):
            await made._check_identity(AFTER)
        now_s += SHORTER_S - 1
        info["state"]["last_seq"] = AFTER
        await made._check_identity(AFTER)
        now_s += SHORTER_S
    info["state"]["last_seq"] = AFTER - 1
    with pytest.raises(_Lost):
        await made._check_identity(AFTER)
    now_s += SHORTER_S
    with pytest.raises(StreamReplaced):
        await made._check_identity(AFTER)


@pytest.mark.parametrize("now", [told(0, replicas=1), told(AFTER, created="t1"), told(0, created="t1")])
async def test_what_is_another_stream_for_certain_is_found_at_once(
    monkeypatch: pytest.MonkeyPatch, now: dict[str, Any]
) -> None:
    """The only replica has lost its store, or the stream was made anew."""
    info = told(AFTER)
    made = reading(monkeypatch, info)
    await made._check_identity(AFTER)
    info.update(now)
    with pytest.raises(StreamReplaced):
        await made._check_identity(AFTER)


# Cutting what a cursor delivers where positions are missing: each one is a record, unreadable, or in a gap.


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
