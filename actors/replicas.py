"""The routers of one pool watch each other: they fold one log, so at one position all must hold the same.

Subjects in and out
    hw.<ns>.digest.<pool>: every router tells the digest of its fold at certain positions, and hears the others'

Which positions is up to the log alone (`Marks`), so all choose the same ones. What is compared is what the log gave: a
router's own decisions that the log has not told yet are left out. A difference is an alarm, loud in the log, in the
metrics and in the statistics, and both take no snapshots while it lasts. Which of the two is wrong is not known here,
and each is a good router by itself, so both go on answering. `headwater replay` folds the same log and tells which one
it agrees with; the other one is to be restarted, and what it logged to be reported.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

import msgspec
import structlog

from headwater import __version__
from headwater.actors.bus_port import BusError, Message, Subscription
from headwater.actors.metrics import RouterMetrics
from headwater.actors.world import World
from headwater.router.load import Loads
from headwater.router.state import RouterState
from headwater.schemas import subjects
from headwater.schemas.replicas import StateDigest

PERIOD_NS: Final = 10_000_000_000
"""Time in the log from one compared position to the next."""

KEPT_MAX: Final = 32
"""Digests kept of each router, for those that are ahead or behind."""

ROUTERS_MAX: Final = 64
"""Routers whose digests are kept; the one heard of first is forgotten first."""

INLINE_ROWS_MAX: Final = 1 << 16
"""With more blocks the digest is made in a thread: it takes about 13 ms for each million."""

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(StateDigest)


class Marks:
    """Which positions are compared: the first message of each `PERIOD_NS`, by the times at which the log stored them.

    Messages are the same for every reader, times included, so this is the same for all who read both neighbours.
    """

    def __init__(self) -> None:
        self._period = -1

    def marked(self, stored_ns: int) -> bool:
        """Is the message stored then, the next one of the log, the first of a period?"""
        before, self._period = self._period, stored_ns // PERIOD_NS
        return before not in (-1, self._period)

    def begin_anew(self) -> None:
        """The next message does not come behind the last one."""
        self._period = -1


class Replicas:
    """See the module. One life of one router."""

    def __init__(self, world: World, name: str, pool: str, metrics: RouterMetrics) -> None:
        self.alarms = 0
        self._world = world
        self._name = name
        self._epoch = 0
        self._subject = subjects.digests(world.ns, pool)
        self._metrics = metrics
        self._own: OrderedDict[int, StateDigest] = OrderedDict()
        self._others: OrderedDict[str, OrderedDict[int, StateDigest]] = OrderedDict()
        self._compared = 0
        self._differs: dict[str, int] = {}
        self._subscription: Subscription | None = None
        self._log = structlog.get_logger("headwater.router").bind(router=name, pool=pool)

    def stats(self) -> dict[str, Any]:
        """For the router's statistics: `diverged` names the routers that hold something else, since which position."""
        return {
            "diverged": dict(self._differs),
            "divergence_alarms": self.alarms,
            "compared_position": self._compared,
        }

    @property
    def diverged(self) -> bool:
        """Did some other router hold another state when it was last compared?"""
        return bool(self._differs)

    async def start(self, epoch: int) -> None:
        """Listen to the others."""
        self._epoch = epoch
        self._subscription = await self._world.bus.subscribe(self._subject, self._on_digest)

    async def stop(self) -> None:
        """Listen no more."""
        if self._subscription is not None:
            await self._subscription.unsubscribe()

    async def mark(self, state: RouterState, loads: Loads) -> None:
        """Tell the digest of the fold that stands still meanwhile; `loads` without own undelivered decisions."""
        if state.index.rows > INLINE_ROWS_MAX:
            digest = await _in_thread(lambda: state.digest(loads))
        else:
            digest = state.digest(loads)
        own = StateDigest(
            self._name, self._epoch, __version__, state.log, state.since, state.position, digest
        )
        _keep(self._own, own)
        for theirs in list(self._others.values()):
            if own.position in theirs:
                self._compare(own, theirs[own.position])
        try:
            await self._world.bus.publish(self._subject, _encode(own))
        except BusError as error:
            self._log.warning("digest_not_told", reason=str(error))

    async def _on_digest(self, message: Message) -> None:
        try:
            theirs = _decoder.decode(message.data)
        except msgspec.DecodeError as error:
            self._log.warning("digest_unreadable", reason=str(error))
            return
        if (theirs.router, theirs.epoch) == (self._name, self._epoch):
            return
        kept = self._others.setdefault(theirs.router, OrderedDict())
        if any(one.epoch < theirs.epoch for one in kept.values()):
            # Its next life: what the one before held is over.
            kept.clear()
            self._clear(theirs.router)
        _keep(kept, theirs)
        if len(self._others) > ROUTERS_MAX:
            gone, _ = self._others.popitem(last=False)
            self._clear(gone)
        own = self._own.get(theirs.position)
        if own is not None:
            self._compare(own, theirs)

    def _compare(self, own: StateDigest, theirs: StateDigest) -> None:
        if own.terms != theirs.terms:
            return
        self._compared = max(self._compared, own.position)
        self._metrics.compared.inc()
        if own.digest == theirs.digest:
            self._clear(theirs.router)
            return
        self.alarms += 1
        self._differs.setdefault(theirs.router, own.position)
        self._metrics.divergence.inc()
        self._metrics.diverged.set(len(self._differs))
        self._log.critical(
            "routers_diverge",
            log_position=own.position,
            digest=own.digest,
            epoch=own.epoch,
            other=theirs.router,
            other_epoch=theirs.epoch,
            other_digest=theirs.digest,
            hint="one of them holds what the log does not say: see which one `headwater replay` agrees with, restart the other",
        )

    def _clear(self, router: str) -> None:
        if self._differs.pop(router, None) is not None:
            self._log.warning("routers_agree_again", other=router)
        self._metrics.diverged.set(len(self._differs))


def _keep(kept: OrderedDict[int, StateDigest], one: StateDigest) -> None:
    kept[one.position] = one
    if len(kept) > KEPT_MAX:
        kept.popitem(last=False)


async def _in_thread(work: Callable[[], str]) -> str:
    """In a thread that reads the state: whoever is cancelled meanwhile goes on only when it is done."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        raise
