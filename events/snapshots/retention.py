"""Decides when a snapshot is due because retention is about to remove messages that the newest one needs.

The server removes a log's oldest messages by age and by bytes, independently of snapshots. A fold can start only if the
message after the newest snapshot is still stored. So each router checks this regularly, and saves a snapshot long before
that message is removed.

By age the check is exact: it uses the age of that message. By bytes it is an estimate: the server reports only the bytes
of the whole log, so messages after the snapshot count as `HEAVY` times the mean message, but never as more than the
whole log. This works as long as a router runs: if none runs for longer than the log's maximum age, messages after the
last snapshot are removed, and `headwater streams` reports it.
"""

from typing import Protocol

import structlog

from headwater.events.errors import LogError
from headwater.events.log import Retention
from headwater.schemas.clock import Clock

MARGIN = 0.5
"""A snapshot is due once messages after the newest one use this share of a limit."""

HEAVY = 4
CHECK_PERIOD_S = 5.0

_log = structlog.get_logger("headwater.retention")


def snapshot_due(held: Retention, saved: int) -> str:
    """Why a snapshot must be saved now, with the newest one at position `saved`; empty if none is due.

    `held` is the retention with `after=saved`. Without messages after the snapshot, none can be lost.
    """
    later = held.last - saved
    if later <= 0:
        return ""
    if held.first > saved + 1:
        return f"the log starts at {held.first}, after position {saved} + 1 of the newest snapshot"
    if held.max_age_s and held.next_age_s >= MARGIN * held.max_age_s:
        return f"position {saved + 1} is {held.next_age_s:.0f} s old of {held.max_age_s:.0f} s"
    if held.max_messages and later >= MARGIN * held.max_messages:
        return f"{later} messages after the newest snapshot, of {held.max_messages}"
    if held.max_bytes:
        mean = held.bytes / (held.last - held.first + 1)
        weight = min(held.bytes, HEAVY * mean * later)
        if weight >= MARGIN * held.max_bytes:
            return f"up to {weight:.0f} bytes after the newest snapshot, of {held.max_bytes}"
    return ""


def forgotten(first: int, last: int, saved: int) -> str:
    """Why a fold cannot continue from its newest snapshot (0: none); empty if it can."""
    if first > saved + 1:
        newest = f"the newest snapshot is at {saved}" if saved else "there is no snapshot"
        return f"the log starts at {first} and {newest}"
    if saved > last:
        return f"the newest snapshot is at {saved} and the log ends at {last}: it was replaced"
    return ""


class Retained(Protocol):
    """The part of `Log` that this module uses."""

    async def retention(self, after: int) -> Retention:
        """See `Log.retention`."""
        ...


class RetentionGuard:
    """Checks a log's retention at most every `CHECK_PERIOD_S`."""

    def __init__(self, log: Retained, clock: Clock) -> None:
        self._log = log
        self._clock = clock
        self._checked_at_s = float("-inf")

    async def due(self, saved: int) -> str:
        """See `snapshot_due`. Empty while the log is unavailable: then no snapshot can be saved either."""
        now = self._clock.monotonic_s()
        if now - self._checked_at_s < CHECK_PERIOD_S:
            return ""
        self._checked_at_s = now
        try:
            reason = snapshot_due(await self._log.retention(saved), saved)
        except LogError as error:
            _log.warning("retention_unknown", reason=str(error))
            return ""
        if reason:
            _log.info("snapshot_due", saved_position=saved, reason=reason)
        return reason
