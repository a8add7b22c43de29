"""When a snapshot is due because the log is about to forget what the newest one needs. Pure, and its guard.

The server cuts a log's oldest messages by age and by bytes, and knows nothing of snapshots. A fold can start
only where the newest snapshot's position + 1 is still held. So whoever folds asks here from time to time, and
saves a snapshot while that message is far from being cut.

By age this is exact: the message's own age is looked at. By bytes it is an estimate: the server tells only
the bytes of the whole log, so messages behind the snapshot count as `HEAVY` times the mean message, but never
as more than the whole log. The promise holds as long as a router runs: with none for longer than the log's
age, the messages behind the last snapshot are cut, and `headwater streams` says so.
"""

from typing import NamedTuple, Protocol

import structlog

from headwater.events.errors import LogError
from headwater.schemas.clock import Clock

MARGIN = 0.5
"""A snapshot is due once this share of a limit is used behind the newest one."""

HEAVY = 4
LOOK_PERIOD_S = 5.0

_log = structlog.get_logger("headwater.retention")


class Retention(NamedTuple):
    """What a log holds and what it may hold; 0 is no limit. `next_age_s`: see `Log.retention`."""

    first: int
    last: int
    bytes: int
    max_bytes: int
    max_messages: int
    max_age_s: float
    next_age_s: float


def snapshot_due(held: Retention, saved: int) -> str:
    """Why a snapshot must be saved now, with the newest one at position `saved`; empty if it need not be.

    `held` was asked for with `after=saved`. Nothing behind the snapshot: nothing can be lost.
    """
    behind = held.last - saved
    if behind <= 0:
        return ""
    if held.first > saved + 1:
        return f"the log begins at {held.first}, behind position {saved} + 1 of the newest snapshot"
    if held.max_age_s and held.next_age_s >= MARGIN * held.max_age_s:
        return f"position {saved + 1} is {held.next_age_s:.0f} s old of {held.max_age_s:.0f} s"
    if held.max_messages and behind >= MARGIN * held.max_messages:
        return f"{behind} messages behind the newest snapshot, of {held.max_messages}"
    if held.max_bytes:
        mean = held.bytes / (held.last - held.first + 1)
        weight = min(held.bytes, HEAVY * mean * behind)
        if weight >= MARGIN * held.max_bytes:
            return f"up to {weight:.0f} bytes behind the newest snapshot, of {held.max_bytes}"
    return ""


def forgotten(first: int, last: int, saved: int) -> str:
    """Why a fold can not be continued from its newest snapshot (0: none); empty if it can be."""
    if first > saved + 1:
        newest = f"the newest snapshot is at {saved}" if saved else "there is no snapshot"
        return f"the log begins at {first} and {newest}"
    if saved > last:
        return f"the newest snapshot is at {saved} and the log ends at {last}: it was replaced"
    return ""


class Retained(Protocol):
    """The part of `Log` that is asked here."""

    async def retention(self, after: int) -> Retention:
        """See `Log.retention`."""
        ...


class RetentionGuard:
    """Looks at a log's retention every `LOOK_PERIOD_S` at most, however often it is asked."""

    def __init__(self, log: Retained, clock: Clock) -> None:
        self._log = log
        self._clock = clock
        self._looked_at_s = float("-inf")

    async def due(self, saved: int) -> str:
        """See `snapshot_due`. Empty while the log can not be asked: then nothing can be saved either."""
        now = self._clock.monotonic_s()
        if now - self._looked_at_s < LOOK_PERIOD_S:
            return ""
        self._looked_at_s = now
        try:
            reason = snapshot_due(await self._log.retention(saved), saved)
        except LogError as error:
            _log.warning("retention_unknown", reason=str(error))
            return ""
        if reason:
            _log.info("snapshot_due", saved_position=saved, reason=reason)
        return reason
