"""The histories of a namespace's pools: each is opened when a page asks for it, and follows its log while a page is open."""

import asyncio
import contextlib
from collections import OrderedDict
from typing import Any, Final

import msgspec
import structlog

from headwater.actors.runtime.ports import BusError, Message, Ports, Subscription
from headwater.actors.runtime.tables import CardTable
from headwater.events.ports import LogError
from headwater.ops.config.setting import ConfigError
from headwater.ops.console.query import not_found
from headwater.ops.history.history import History, NotKept
from headwater.ops.nats.connect import choose_pool, live_pools
from headwater.schemas import subjects
from headwater.schemas.routing import StateDigest

POLL_S: Final = 0.5
"""How often a log that someone watches is asked for news."""

WATCHED_S: Final = 30.0
"""A history is followed for this long after a page has asked for it."""

OPEN_WAIT_S: Final = 0.4
"""A first view waits so long for the history to be read; then it shows what is read."""

DIGESTS_KEPT: Final = 256

_log = structlog.get_logger("headwater.console")
_digest = msgspec.msgpack.Decoder(StateDigest)


class Pools:
    """The histories by pool. `source` says for people where they come from; `live`: their logs may grow."""

    def __init__(self, ports: Ports, source: str, *, live: bool = True) -> None:
        self._ports = ports
        self._source = source
        self._live = live
        self._histories: dict[str, History] = {}
        self._opening = asyncio.Lock()
        self._watched: dict[str, float] = {}
        self._wake = asyncio.Event()
        self._replicas: dict[str, OrderedDict[tuple[str, int], StateDigest]] = {}
        self._subscriptions: list[Subscription] = []

    async def listing(self) -> dict[str, Any]:
        """The pools that have a log, those with workers first."""
        names = set(await CardTable(self._ports.cards).pools())
        if self._ports.pool_logs is not None:
            with contextlib.suppress(LogError):
                names |= set(await self._ports.pool_logs())
        live = await live_pools(self._ports) if self._live else set()
        cards = await CardTable(self._ports.cards).models()
        return {
            "pools": [
                {
                    "pool": name,
                    "models": [card.name for card in cards if card.pool == name],
                    "live": name in live,
                }
                for name in sorted(names, key=lambda name: (name not in live, name))
            ],
            "source": self._source,
            "live": self._live,
        }

    async def history(self, pool: str) -> History:
        """The history of a pool, opened if need be. Raises `ApiError` 404 and `LogError`."""
        async with self._opening:
            if not pool or pool not in self._histories:
                try:
                    pool = await choose_pool(self._ports, pool)
                except ConfigError as error:
                    raise not_found(
                        str(error).removeprefix("--pool: ").removeprefix("--pool ") + "."
                    ) from error
            if pool not in self._histories:
                history = History(self._ports, pool, await self._ports.pool_log(pool))
                await history.open()
                self._histories[pool] = history
                await self._listen(pool)
        self.watch(pool)
        history = self._histories[pool]
        if history.indexed < history.head or not history.head:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(OPEN_WAIT_S):
                    await history.caught_up.wait()
        return history

    def follows(self, history: History) -> bool:
        """Is this the history of its pool? Another one takes its place where the log was replaced."""
        return self._histories.get(history.pool) is history

    def watch(self, pool: str) -> None:
        """Somebody looks at a pool: follow its log for a while."""
        self._watched[pool] = asyncio.get_running_loop().time() + WATCHED_S
        self._wake.set()

    async def run(self) -> None:
        """Follow the logs of pools that somebody looks at, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            watched = [
                pool
                for pool, until in self._watched.items()
                if until > loop.time() and pool in self._histories
            ]
            if not watched:
                self._wake.clear()
                await self._wake.wait()
                # Its history is opened first.
                await asyncio.sleep(0.01)
                continue
            for pool in watched:
                await self._follow(pool)
            await asyncio.sleep(POLL_S if self._live else WATCHED_S)

    async def _follow(self, pool: str) -> None:
        try:
            await self._histories[pool].follow()
        except NotKept as error:
            _log.warning("console_history_dropped", pool=pool, reason=str(error))
            del self._histories[pool]
        except LogError as error:
            _log.warning("console_log_unavailable", pool=pool, reason=str(error))
            await asyncio.sleep(1.0)

    # Whether the pool's routers agree.

    async def _listen(self, pool: str) -> None:
        """Note the digests that routers publish of their states."""
        if not self._live:
            return
        digests: OrderedDict[tuple[str, int], StateDigest] = OrderedDict()
        self._replicas[pool] = digests

        async def take(message: Message) -> None:
            try:
                state_digest = _digest.decode(message.data)
            except msgspec.DecodeError:
                return
            digests[state_digest.router, state_digest.position] = state_digest
            while len(digests) > DIGESTS_KEPT:
                digests.popitem(last=False)

        try:
            self._subscriptions.append(
                await self._ports.bus.subscribe(subjects.digests(self._ports.ns, pool), take)
            )
        except BusError as error:
            _log.warning("console_digests_unavailable", pool=pool, reason=str(error))

    def replicas(self, pool: str) -> dict[str, Any]:
        """The newest digest of each router, and whether it agrees with the others at the same position."""
        digests = self._replicas.get(pool, OrderedDict())
        newest = {state_digest.router: state_digest for state_digest in digests.values()}
        rows = []
        for state_digest in newest.values():
            same = [
                other
                for other in digests.values()
                if other.position == state_digest.position and other.terms == state_digest.terms
            ]
            agrees = all(other.digest == state_digest.digest for other in same) if len(same) > 1 else None
            rows.append({**msgspec.structs.asdict(state_digest), "agrees": agrees})
        notice = (
            ""
            if rows
            else (
                "No router has published a digest since this console began to listen; they do so once a minute."
                if self._live
                else "A capture has no digests of routers."
            )
        )
        return {"replicas": rows, "notice": notice}
