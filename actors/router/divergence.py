"""Divergence check: the routers of a pool fold one log, so at one position their states must be equal.

Subjects in and out
    hw.<ns>.digest.<pool>: every router publishes the digest of its fold at certain positions and compares the others'

The positions depend on the log alone (`Marks`), so all routers choose the same ones. A digest covers what the log delivered,
without own decisions that are not in the log yet. A difference raises an alarm in the log, the metrics and the
statistics, and neither router takes snapshots while it lasts. Both keep answering: which of them is wrong is not known
here. `headwater replay` folds the same log and shows which one it agrees with; restart the other, and report what it logged.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

import msgspec
import structlog

from headwater import __version__
from headwater.actors.bus.port import BusError, Message, Subscription
from headwater.actors.metrics import RouterMetrics
from headwater.actors.runtime.ports import Ports
from headwater.router.fold.load import Loads
from headwater.router.fold.state import RouterState
from headwater.schemas import subjects
from headwater.schemas.events.digest import StateDigest

PERIOD_NS: Final = 10_000_000_000
"""Interval between compared positions, by the log's timestamps."""

KEPT_MAX: Final = 32
"""Digests kept of each router, to compare with routers that are ahead or behind."""

ROUTERS_MAX: Final = 64
"""Routers whose digests are kept. The one that was first seen is dropped first."""

INLINE_ROWS_MAX: Final = 1 << 16
"""With more blocks the digest is computed in a thread: it takes about 13 ms for each million."""

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(StateDigest)


class Marks:
    """Selects the compared positions: the first message of each `PERIOD_NS`, by the times at which the log stored them.

    Messages and their times are equal for every reader, so all routers that read two neighbours agree.
    """

    def __init__(self) -> None:
        self._period = -1

    def is_marked(self, stored_ns: int) -> bool:
        """Is the next message of the log, stored at this time, the first of a period?"""
        before, self._period = self._period, stored_ns // PERIOD_NS
        return before not in (-1, self._period)

    def reset(self) -> None:
        """The next message does not follow the last one."""
        self._period = -1


class DivergenceCheck:
    """See the module. For one incarnation of a router."""

    def __init__(self, ports: Ports, name: str, pool: str, metrics: RouterMetrics) -> None:
        self.alarms = 0
        self._ports = ports
        self._name = name
        self._epoch = 0
        self._subject = subjects.digests(ports.ns, pool)
        self._metrics = metrics
        self._own: OrderedDict[int, StateDigest] = OrderedDict()
        self._others: OrderedDict[str, OrderedDict[int, StateDigest]] = OrderedDict()
        self._compared = 0
        self._differs: dict[str, int] = {}
        self._subscription: Subscription | None = None
        self._log = structlog.get_logger("headwater.router").bind(router=name, pool=pool)

    def stats(self) -> dict[str, Any]:
        """Part of the router's statistics. `diverged` maps each router with another state to the first such position."""
        return {
            "diverged": dict(self._differs),
            "divergence_alarms": self.alarms,
            "compared_position": self._compared,
        }

    @property
    def diverged(self) -> bool:
        """Did another router have a different state when it was last compared?"""
        return bool(self._differs)

    async def start(self, epoch: int) -> None:
        """Subscribe to the digests of other routers."""
        self._epoch = epoch
        self._subscription = await self._ports.bus.subscribe(self._subject, self._on_digest)

    async def stop(self) -> None:
        """Unsubscribe."""
        if self._subscription is not None:
            await self._subscription.unsubscribe()

    async def publish(self, state: RouterState, loads: Loads) -> None:
        """Publish the digest of the fold, which must not change until this returns. `loads` exclude unwritten own decisions."""
        if state.index.rows > INLINE_ROWS_MAX:
            digest = await _in_thread(lambda: state.digest(loads))
        else:
            digest = state.digest(loads)
        own = StateDigest(
            self._name, self._epoch, __version__, state.log, state.since, state.position, digest
        )
        _store(self._own, own)
        for theirs in list(self._others.values()):
            if own.position in theirs:
                self._compare(own, theirs[own.position])
        try:
            await self._ports.bus.publish(self._subject, _encode(own))
        except BusError as error:
            self._log.warning("digest_publish_failed", reason=str(error))

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
            # A new incarnation: digests of the former one are void.
            kept.clear()
            self._clear(theirs.router)
        _store(kept, theirs)
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
            "routers_diverged",
            log_position=own.position,
            digest=own.digest,
            epoch=own.epoch,
            other=theirs.router,
            other_epoch=theirs.epoch,
            other_digest=theirs.digest,
            hint="one state does not follow from the log: restart the router that `headwater replay` disagrees with",
        )

    def _clear(self, router: str) -> None:
        if self._differs.pop(router, None) is not None:
            self._log.warning("routers_converged", other=router)
        self._metrics.diverged.set(len(self._differs))


def _store(kept: OrderedDict[int, StateDigest], one: StateDigest) -> None:
    kept[one.position] = one
    if len(kept) > KEPT_MAX:
        kept.popitem(last=False)


async def _in_thread(work: Callable[[], str]) -> str:
    """Run in a thread that reads the state. A cancellation takes effect only when the thread is done."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        raise
