"""The search for a worker that takes a request or a part of it. Pure; used by generation and pooling alike.

A search lasts until its deadline. Time that a query spends in a router's queue does not count: the router bounds it.
A worker that refused is excluded from the next query, until the router has no other worker left. An incarnation that is gone is
never queried again: its worker may come back under a new epoch, which the search waits for.
"""

from typing import Self

import msgspec

from headwater.actors.http.errors import ApiError, overloaded
from headwater.schemas.events.route import RouteRefused

PLACE_S_MAX = 10.0
"""Seconds that a new request searches for a worker before it is refused with 503."""

MOVE_S_MAX = 120.0
"""Seconds that a request whose answer has begun searches for another worker. An engine that was the only one takes a minute to start
again: 64 s were measured on a GPU that three fleets shared."""

RETRY_S, RETRY_S_MAX = 0.1, 1.0
"""Seconds between two queries while the router names no worker, doubled from the first value to the last."""


class Placement(msgspec.Struct, frozen=True):
    """One search. `exclude` lists worker epochs as "<worker>.<epoch>" that are tried again once the router has no other,
    `gone` those that never are; `pinned` is the only worker to try first.

    `pauses` counts those of this search. `reason` and `retry_after_s` describe the last refusal. `origin` says, for a search
    that moves a request, what it moves away from; it is empty for a new request.
    """

    deadline_s: float
    pinned: str = ""
    pauses: int = 0
    exclude: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    reason: str = "no router replied"
    retry_after_s: float = 1.0
    origin: str = ""

    @property
    def excluded(self) -> tuple[str, ...]:
        """What the next query leaves out."""
        return (*self.gone, *(one for one in self.exclude if one not in self.gone))

    def leave_out(self, worker: str, epoch: int, *, gone: bool) -> Self:
        """Query for another worker first: this one failed with the request. `gone`: this incarnation of it is never tried again."""
        return self.refused_by_worker(worker, epoch, "", gone=gone)

    def pause_s(self, now_s: float) -> float:
        """How long to wait before the next query. The last one is at the deadline."""
        return min(RETRY_S * 2.0 ** min(self.pauses, 30), RETRY_S_MAX, max(0.0, self.deadline_s - now_s))

    def paused(self) -> Self:
        """A query is to be repeated after `pause_s`."""
        return msgspec.structs.replace(self, pauses=self.pauses + 1)

    def extend(self, waited_s: float) -> Self:
        """Add the time that the query spent in the router's queue."""
        return msgspec.structs.replace(self, deadline_s=self.deadline_s + waited_s) if waited_s else self

    def restart(self, deadline_s: float) -> Self:
        """Search until a later deadline."""
        return msgspec.structs.replace(self, deadline_s=max(self.deadline_s, deadline_s), pauses=0)

    def refused_by_router(self, refusal: RouteRefused) -> Self:
        """Retry all workers. The reason of a worker that refused says more than "no other worker", so it is kept."""
        if self.pinned:
            return msgspec.structs.replace(self, pinned="")
        reason = self.reason if self.exclude and self.reason else refusal.reason
        retry_after_s = (
            max(self.retry_after_s, refusal.retry_after_s) if self.exclude else refusal.retry_after_s
        )
        return msgspec.structs.replace(self, exclude=(), reason=reason, retry_after_s=retry_after_s)

    def unanswered(self, reason: str) -> Self:
        """No router replied."""
        return msgspec.structs.replace(self, reason=f"no router replied ({reason})")

    def refused_by_worker(self, worker: str, epoch: int, reason: str, *, gone: bool = False) -> Self:
        """Exclude a worker that did not take its part; `gone`: this incarnation of it never will."""
        incarnation = f"{worker}.{epoch}"
        if gone:
            known = self.gone if incarnation in self.gone else (*self.gone, incarnation)
            return msgspec.structs.replace(self, pinned="", gone=known, reason=reason)
        return msgspec.structs.replace(self, pinned="", exclude=(*self.exclude, incarnation), reason=reason)

    def expired(self, now_s: float) -> ApiError | None:
        """The error that ends the search once its deadline has passed: 503."""
        if now_s < self.deadline_s:
            return None
        return overloaded(f"No worker could take the request: {self.reason}.", self.retry_after_s)
