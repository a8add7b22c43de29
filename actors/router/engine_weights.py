"""An operator's engine weights, as a router takes, shows and keeps them.

Subjects in
    hw.<ns>.weights.<pool> (queue group `router`): one router of the pool answers
Subjects out
    the pool log: the router's fleet events
On loss of the log
    a command is answered with 504: its weights may still be stored later
On a gap in the log
    the weights that were in force before it are published again: no other place has them
"""

from typing import Final

import msgspec
import structlog

from headwater.actors.bus.port import BusError, Message, Subscription
from headwater.actors.router.follower import LogFollower
from headwater.actors.runtime.ports import Ports
from headwater.events.writer import Writer
from headwater.router.decision.engine_draw import find_invalid_weight
from headwater.router.fold.load import Loads
from headwater.schemas import subjects
from headwater.schemas.events.fleet import EnginesWeighted
from headwater.schemas.messages.control import ControlReply
from headwater.schemas.messages.engine_weights import EngineStatus, WeightsReply, WeightsRequest

FOLDED_S: Final = 5.0
"""How long a command may take until this router has its event from the log."""

POLL_S: Final = 0.01

_request = msgspec.msgpack.Decoder(WeightsRequest)
_encode = msgspec.msgpack.Encoder().encode

_log = structlog.get_logger("headwater.weights")


class EngineWeightsKeeper:
    """See the module. `fleet` is the router's writer of fleet events."""

    def __init__(self, ports: Ports, name: str, pool: str, follower: LogFollower, fleet: Writer) -> None:
        self._ports = ports
        self._name = name
        self._pool = pool
        self._follower = follower
        self._fleet = fleet
        self._subscription: Subscription | None = None

    async def subscribe(self) -> None:
        """Answer commands from now on."""
        subject = subjects.engine_weights(self._ports.ns, self._pool)
        self._subscription = await self._ports.bus.subscribe(subject, self._on_request, queue="router")

    async def close(self) -> None:
        """Answer no more commands. Idempotent."""
        if self._subscription is not None:
            await self._subscription.unsubscribe()
            self._subscription = None

    def republish_lost(self) -> None:
        """Publish the weights that a gap in the log removed from the fold, unless others were set since."""
        if self._follower.lag()["lag_messages"]:
            # They may be set again further on.
            return
        lost = self._follower.take_lost_weights()
        if lost and not self._follower.state.loads.engine_weights:
            _log.warning("engine_weights_republished", pool=self._pool, weights=lost)
            self._fleet.offer(EnginesWeighted(lost, f"router {self._name}, after a gap in the log"))

    async def _on_request(self, message: Message) -> None:
        try:
            request = _request.decode(message.data)
        except msgspec.DecodeError as error:
            reply = ControlReply(400, f"the command cannot be decoded, check the releases: {error}")
        else:
            reply = await self._execute(request)
        answer = WeightsReply(reply, engine_status(self._follower.state.loads))
        try:
            await self._ports.bus.publish(message.reply, _encode(answer))
        except BusError as error:
            _log.warning("weights_reply_not_sent", pool=self._pool, reason=str(error))

    async def _execute(self, request: WeightsRequest) -> ControlReply:
        if request.weights is None:
            return ControlReply(200, "engine weights")
        workers = list(self._follower.state.loads.workers.values())
        invalid = find_invalid_weight(request.weights, workers) if request.weights else ""
        if invalid:
            return ControlReply(400, invalid)
        if not self._fleet.offer(EnginesWeighted(request.weights, request.by)):
            return ControlReply(503, "the log accepts no events at present; nothing was changed")
        until_s = self._ports.clock.monotonic_s() + FOLDED_S
        while self._fleet.pending or self._follower.state.position < self._fleet.position:
            if self._ports.clock.monotonic_s() >= until_s:
                return ControlReply(
                    504, f"the log has not stored the weights within {FOLDED_S:g} s; show them again"
                )
            await self._ports.clock.sleep(POLL_S)
        _log.info("engine_weights_set", pool=self._pool, weights=request.weights, by=request.by)
        return ControlReply(200, "engine weights set" if request.weights else "engine weights removed")


def engine_status(loads: Loads) -> tuple[EngineStatus, ...]:
    """The engines of a pool's workers and those with a weight, by name."""
    weights = loads.engine_weights
    found = []
    for engine in sorted({worker.engine for worker in loads.workers.values()} | weights.keys()):
        workers = [worker for worker in loads.workers.values() if worker.engine == engine]
        weight = weights.get(engine, 0.0) if weights else None
        ready = sum(worker.takes_requests for worker in workers)
        requests = sum(len(worker.requests) for worker in workers)
        found.append(EngineStatus(engine, weight, len(workers), ready, requests))
    return tuple(found)
