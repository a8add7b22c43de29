"""What operators' commands set at one router of a pool, in the pool's log: engine weights, and traffic splits.

A split says which shares of new requests the pool's revisions get, or which its policies decide. The plan of a roll-out is in the
event of its present step, so whoever asks a router knows how far it is, and any process can go on.

Subjects in
    hw.<ns>.weights.<pool>, hw.<ns>.split.<pool> (queue group `router`): one router of the pool answers
Subjects out
    the pool log: the router's fleet events
On two commands at once
    each split names the one that it replaces; the fold takes the one that the log stored first, and the other is answered with 409
On loss of the log
    a command is answered with 504: its event may still be stored later
On a gap in the log
    what was in force before it is published again: no other place has it
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Final, Generic, TypeVar

import msgspec
import structlog

from headwater.actors.router.follower import LogFollower
from headwater.actors.runtime.ports import BusError, Message, Ports, Subscription
from headwater.events.writer import Writer
from headwater.router.candidates import find_invalid_weight
from headwater.router.load import Loads, Split
from headwater.router.policies import POLICIES
from headwater.schemas import subjects
from headwater.schemas.control import (
    ControlReply,
    EngineStatus,
    ShareStatus,
    SplitReply,
    SplitRequest,
    WeightsReply,
    WeightsRequest,
)
from headwater.schemas.events import EnginesWeighted, Event, TrafficSplit

FOLDED_S: Final = 5.0
"""How long a command may take until this router has its event from the log."""

POLL_S: Final = 0.01

SHARES_MAX: Final = 64
"""Names in a split at most: each is in the record of every decision."""

NOT_DRAWN: Final = "direct"
"""The policy of requests that name their worker."""

_encode = msgspec.msgpack.Encoder().encode

_weights_log = structlog.get_logger("headwater.weights")
_split_log = structlog.get_logger("headwater.split")

RequestT = TypeVar("RequestT")


class _CommandKeeper(ABC, Generic[RequestT]):
    """Takes the commands of one subject. `fleet` is the router's writer of fleet events."""

    def __init__(
        self,
        ports: Ports,
        pool: str,
        follower: LogFollower,
        fleet: Writer,
        subject: str,
        requests: msgspec.msgpack.Decoder[RequestT],
    ) -> None:
        self._ports = ports
        self._pool = pool
        self._follower = follower
        self._fleet = fleet
        self._subject = subject
        self._requests = requests
        self._subscription: Subscription | None = None

    async def subscribe(self) -> None:
        """Answer commands from now on."""
        self._subscription = await self._ports.bus.subscribe(self._subject, self._on_request, queue="router")

    async def close(self) -> None:
        """Answer no more commands. Idempotent."""
        if self._subscription is not None:
            await self._subscription.unsubscribe()
            self._subscription = None

    def republish_lost(self) -> None:
        """Publish what a gap in the log removed from the fold, unless other commands came since."""
        # Behind the log, they may come further on.
        if not self._follower.lag()["lag_messages"]:
            self._republish()

    async def _on_request(self, message: Message) -> None:
        try:
            request = self._requests.decode(message.data)
        except msgspec.DecodeError as error:
            reply = ControlReply(400, f"the command cannot be decoded, check the releases: {error}")
            answer = self._answer(None, reply)
        else:
            answer = self._answer(request, await self._execute(request))
        try:
            await self._ports.bus.publish(message.reply, _encode(answer))
        except BusError as error:
            self._log_unsent(str(error))

    async def _write(self, event: Event, setting_name: str) -> ControlReply | None:
        """Write an event and return once the router has it from the log; else why not."""
        if not self._fleet.offer(event):
            return ControlReply(503, "the log accepts no events at present; nothing was changed")
        clock = self._ports.clock
        until_s = clock.monotonic_s() + FOLDED_S
        while self._fleet.pending or self._follower.state.position < self._fleet.position:
            if clock.monotonic_s() >= until_s:
                return ControlReply(
                    504, f"the log has not stored {setting_name} within {FOLDED_S:g} s; show them again"
                )
            await clock.sleep(POLL_S)
        return None

    @abstractmethod
    def _republish(self) -> None: ...

    @abstractmethod
    async def _execute(self, request: RequestT) -> ControlReply: ...

    @abstractmethod
    def _answer(self, request: RequestT | None, reply: ControlReply) -> msgspec.Struct:
        """The whole answer; None: the request cannot be decoded."""

    @abstractmethod
    def _log_unsent(self, reason: str) -> None: ...


class EngineWeightsKeeper(_CommandKeeper[WeightsRequest]):
    """The engine weights of a pool at one router."""

    def __init__(self, ports: Ports, name: str, pool: str, follower: LogFollower, fleet: Writer) -> None:
        subject = subjects.engine_weights(ports.ns, pool)
        super().__init__(ports, pool, follower, fleet, subject, msgspec.msgpack.Decoder(WeightsRequest))
        self._name = name

    def _republish(self) -> None:
        lost = self._follower.take_lost_weights()
        if lost and not self._follower.state.loads.engine_weights:
            _weights_log.warning("engine_weights_republished", pool=self._pool, weights=lost)
            self._fleet.offer(EnginesWeighted(lost, f"router {self._name}, after a gap in the log"))

    def _answer(self, request: WeightsRequest | None, reply: ControlReply) -> WeightsReply:
        return WeightsReply(reply, engine_status(self._follower.state.loads))

    def _log_unsent(self, reason: str) -> None:
        _weights_log.warning("weights_reply_not_sent", pool=self._pool, reason=reason)

    async def _execute(self, request: WeightsRequest) -> ControlReply:
        if request.weights is None:
            return ControlReply(200, "engine weights")
        workers = list(self._follower.state.loads.workers.values())
        invalid = find_invalid_weight(request.weights, workers) if request.weights else ""
        if invalid:
            return ControlReply(400, invalid)
        event = EnginesWeighted(request.weights, request.by)
        failure = await self._write(event, "the weights")
        if failure is not None:
            return failure
        _weights_log.info("engine_weights_set", pool=self._pool, weights=request.weights, by=request.by)
        return ControlReply(200, "engine weights set" if request.weights else "engine weights removed")


class TrafficSplitKeeper(_CommandKeeper[SplitRequest]):
    """The splits of a pool at one router. `policy` is that of queries that state and draw none."""

    def __init__(self, ports: Ports, pool: str, follower: LogFollower, fleet: Writer, policy: str) -> None:
        subject = subjects.traffic_split(ports.ns, pool)
        super().__init__(ports, pool, follower, fleet, subject, msgspec.msgpack.Decoder(SplitRequest))
        self._policy = policy

    def _republish(self) -> None:
        for lost in self._follower.take_lost_splits():
            if lost.event.subject not in self._follower.state.loads.splits:
                _split_log.warning("traffic_split_republished", pool=self._pool, shares=lost.event.shares)
                self._fleet.offer(msgspec.structs.replace(lost.event, after=0))

    def _answer(self, request: SplitRequest | None, reply: ControlReply) -> SplitReply:
        if request is None:
            return SplitReply(reply)
        subject = request.subject
        loads = self._follower.state.loads
        split = loads.splits.get(subject)
        members = revision_status(loads) if subject == "revision" else policy_status(loads)
        default = self._policy if subject == "policy" else ""
        if split is None:
            return SplitReply(reply, members=members, default=default)
        return SplitReply(reply, split.position, split.stored_ns, split.event, members, default)

    def _log_unsent(self, reason: str) -> None:
        _split_log.warning("split_reply_not_sent", pool=self._pool, reason=reason)

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
        failure = await self._write(event, "the traffic split")
        if failure is not None:
            return failure
        now = self._follower.state.loads.splits.get(request.subject)
        if now is None or now.event != event:
            return _overtaken(now)
        _split_log.info(
            "traffic_split_set",
            pool=self._pool,
            by=event.by,
            subject=event.subject,
            shares=event.shares,
            reason=event.reason,
        )
        return ControlReply(200, "traffic split set" if event.shares else "traffic split removed")


def engine_status(loads: Loads) -> tuple[EngineStatus, ...]:
    """The engines of a pool's workers and those with a weight, by name."""
    weights = loads.engine_weights
    statuses = []
    for engine in sorted({worker.engine for worker in loads.workers.values()} | weights.keys()):
        workers = [worker for worker in loads.workers.values() if worker.engine == engine]
        weight = weights.get(engine, 0.0) if weights else None
        ready = sum(worker.takes_requests for worker in workers)
        requests = sum(len(worker.requests) for worker in workers)
        statuses.append(EngineStatus(engine, weight, len(workers), ready, requests))
    return tuple(statuses)


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
        available = sorted(POLICIES.keys() - {NOT_DRAWN})
        unknown = sorted(event.shares.keys() - set(available))
        return f"unknown policy {unknown[0]}: available are {', '.join(available)}" if unknown else ""
    return _find_invalid_revisions(event.shares, positive, loads, present)


def _find_invalid_revisions(
    shares: Mapping[str, float], positive: set[str], loads: Loads, present: Split | None
) -> str:
    workers = list(loads.workers.values())
    worker_revisions = {worker.revision for worker in workers}
    before = set(present.event.shares) if present is not None else set()
    unknown = sorted(positive - worker_revisions - before)
    if unknown:
        listed = ", ".join(sorted(filter(None, worker_revisions))) or "none"
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
    statuses = []
    for revision in sorted({worker.revision for worker in loads.workers.values()} | shares.keys()):
        workers = [worker for worker in loads.workers.values() if worker.revision == revision]
        ready = sum(worker.takes_requests for worker in workers)
        requests = sum(len(worker.requests) for worker in workers)
        statuses.append(ShareStatus(revision, shares.get(revision), len(workers), ready, requests))
    return tuple(statuses)


def policy_status(loads: Loads) -> tuple[ShareStatus, ...]:
    """The policies with a share, by name."""
    return tuple(ShareStatus(name, share) for name, share in sorted(loads.shares("policy").items()))
