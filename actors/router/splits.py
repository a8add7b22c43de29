"""A pool's traffic splits at one router: which shares of new requests its revisions get, and which its policies decide.

The plan of a roll-out is in the event of its present step, so whoever asks a router knows how far it is, and any process can go on.

Subjects in
    hw.<ns>.split.<pool> (queue group `router`): one router of the pool answers
Subjects out
    the pool log: the router's fleet events
On two commands at once
    each names the split that it replaces; the fold takes the one that the log stored first, and the other is answered with 409
On loss of the log
    a command is answered with 504: its split may still be stored later
On a gap in the log
    the splits that were in force before it are published again: no other place has them
"""

import math
from collections.abc import Mapping
from typing import Final

import msgspec
import structlog

from headwater.actors.bus import BusError, Message, Subscription
from headwater.actors.router.decisions import write_and_fold
from headwater.actors.router.follower import LogFollower
from headwater.actors.runtime.persistence import Ports
from headwater.events.writer import Writer
from headwater.router.decision.policies import POLICIES
from headwater.router.fold.load import Loads, Split
from headwater.schemas import subjects
from headwater.schemas.events.fleet import SplitSubject, TrafficSplit
from headwater.schemas.events.splits import ShareStatus, SplitReply, SplitRequest
from headwater.schemas.messages.control import ControlReply

SHARES_MAX: Final = 64
"""Names in a split at most: each is in the record of every decision."""

NOT_DRAWN: Final = "direct"
"""The policy of requests that name their worker."""

_request = msgspec.msgpack.Decoder(SplitRequest)
_encode = msgspec.msgpack.Encoder().encode

_log = structlog.get_logger("headwater.split")


class TrafficSplitKeeper:
    """The splits of a pool at one router. `fleet` is its writer of fleet events, `policy` that of queries that state and draw none."""

    def __init__(
        self, ports: Ports, name: str, pool: str, follower: LogFollower, fleet: Writer, policy: str
    ) -> None:
        self._ports = ports
        self._name = name
        self._pool = pool
        self._follower = follower
        self._fleet = fleet
        self._policy = policy
        self._subscription: Subscription | None = None

    async def subscribe(self) -> None:
        """Answer commands from now on."""
        subject = subjects.traffic_split(self._ports.ns, self._pool)
        self._subscription = await self._ports.bus.subscribe(subject, self._on_request, queue="router")

    async def close(self) -> None:
        """Answer no more commands. Idempotent."""
        if self._subscription is not None:
            await self._subscription.unsubscribe()
            self._subscription = None

    def republish_lost(self) -> None:
        """Publish the splits that a gap in the log removed from the fold, unless others were set since."""
        if self._follower.lag()["lag_messages"]:
            # They may be set again further on.
            return
        for lost in self._follower.take_lost_splits():
            if lost.event.subject not in self._follower.state.loads.splits:
                _log.warning("traffic_split_republished", pool=self._pool, shares=lost.event.shares)
                self._fleet.offer(msgspec.structs.replace(lost.event, after=0))

    async def _on_request(self, message: Message) -> None:
        try:
            request = _request.decode(message.data)
        except msgspec.DecodeError as error:
            answer = SplitReply(
                ControlReply(400, f"the command cannot be decoded, check the releases: {error}")
            )
        else:
            answer = self._answer(request.subject, await self._execute(request))
        try:
            await self._ports.bus.publish(message.reply, _encode(answer))
        except BusError as error:
            _log.warning("split_reply_not_sent", pool=self._pool, reason=str(error))

    def _answer(self, subject: SplitSubject, reply: ControlReply) -> SplitReply:
        loads = self._follower.state.loads
        split = loads.splits.get(subject)
        members = revision_status(loads) if subject == "revision" else policy_status(loads)
        default = self._policy if subject == "policy" else ""
        if split is None:
            return SplitReply(reply, members=members, default=default)
        return SplitReply(reply, split.position, split.stored_ns, split.event, members, default)

    async def _execute(self, request: SplitRequest) -> ControlReply:
        loads, event = self._follower.state.loads, request.split
        if event is None:
            return ControlReply(200, "traffic split")
        present = loads.splits.get(request.subject)
        invalid = find_invalid_split(event, loads, present)
        if event.subject != request.subject or invalid:
            return ControlReply(400, invalid or f"a split by {event.subject} is none by {request.subject}")
        if event.after != (present.position if present is not None else 0):
            return _overtaken(present)
        failure = await write_and_fold(
            self._ports.clock, self._follower, self._fleet, event, "the traffic split"
        )
        if failure is not None:
            return failure
        now = self._follower.state.loads.splits.get(request.subject)
        if now is None or now.event != event:
            return _overtaken(now)
        _log.info(
            "traffic_split_set",
            pool=self._pool,
            by=event.by,
            subject=event.subject,
            shares=event.shares,
            reason=event.reason,
        )
        return ControlReply(200, "traffic split set" if event.shares else "traffic split removed")


def _overtaken(present: Split | None) -> ControlReply:
    if present is None:
        return ControlReply(409, "the split that this one was to replace applies no more; look again")
    event = present.event
    return ControlReply(
        409,
        f"another split applies since position {present.position}, set by {event.by or 'unknown'}: look again",
    )


def find_invalid_split(event: TrafficSplit, loads: Loads, present: Split | None) -> str:
    """Why a split cannot be set for a pool whose `present` one is this, or ""."""
    for name, share in sorted(event.shares.items()):
        if not (math.isfinite(share) and share >= 0):
            return f"the share of {name} is {share:g}: it must be a finite number, and not negative"
    if len(event.shares) > SHARES_MAX:
        return f"it names {len(event.shares)}, and at most {SHARES_MAX} may have a share: leave out those that are gone"
    if not event.shares:
        return ""
    positive = {name for name, share in event.shares.items() if share > 0}
    if not positive:
        return "every share is 0, so no request could be served: give one of them a greater share"
    if event.subject == "policy":
        known = sorted(POLICIES.keys() - {NOT_DRAWN})
        unknown = sorted(event.shares.keys() - set(known))
        return f"unknown policy {unknown[0]}: available are {', '.join(known)}" if unknown else ""
    return _find_invalid_revisions(event.shares, positive, loads, present)


def _find_invalid_revisions(
    shares: Mapping[str, float], positive: set[str], loads: Loads, present: Split | None
) -> str:
    workers = list(loads.workers.values())
    there = {worker.revision for worker in workers}
    before = set(present.event.shares) if present is not None else set()
    unknown = sorted(positive - there - before)
    if unknown:
        listed = ", ".join(sorted(filter(None, there))) or "none"
        return f"no worker of this pool is of revision {unknown[0]!r}; its revisions are: {listed}"
    if not any(worker.takes_requests and shares.get(worker.revision, 1.0) > 0 for worker in workers):
        return (
            f"no worker of {' or '.join(sorted(positive))} takes requests (gone, draining, paused or asleep), "
            "so no request could be served"
        )
    return ""


def revision_status(loads: Loads) -> tuple[ShareStatus, ...]:
    """The revisions of a pool's workers and those with a share, by name."""
    shares = loads.shares("revision")
    found = []
    for revision in sorted({worker.revision for worker in loads.workers.values()} | shares.keys()):
        workers = [worker for worker in loads.workers.values() if worker.revision == revision]
        ready = sum(worker.takes_requests for worker in workers)
        requests = sum(len(worker.requests) for worker in workers)
        found.append(ShareStatus(revision, shares.get(revision), len(workers), ready, requests))
    return tuple(found)


def policy_status(loads: Loads) -> tuple[ShareStatus, ...]:
    """The policies with a share, by name."""
    return tuple(ShareStatus(name, share) for name, share in sorted(loads.shares("policy").items()))
