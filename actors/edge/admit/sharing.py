"""Shares use of rate limits between edges over core NATS: each publishes its own, and charges what the others publish.

Subjects
    hw.<ns>.usage.<edge>, published every `SHARE_S` while accounts of this edge change, else every `IDLE_S`
On loss of NATS
    each edge enforces the whole limit on its own clients; afterwards it charges what the others used in the meantime, up to one
    minute's limit
Error
    n edges that do not yet know of each other's use admit at most n times what is left, for `SHARE_S` and the time of a
    message; what was admitted too much is debt, and nothing is admitted until it has drained. See docs/guides/limits.md.
"""

from typing import Final

import msgspec
import structlog

from headwater.actors.bus import Bus, BusError, Message, Subscription
from headwater.actors.edge.admit.account import FORGET_S, STALE_S
from headwater.actors.edge.admit.limiter import RateLimiter
from headwater.actors.edge.settings import RateLimits
from headwater.schemas import subjects
from headwater.schemas.messages.inference import AccountUsage, UsageReport

SHARE_S: Final = 0.15
IDLE_S: Final = 1.0

REPEAT_S: Final = 2.0
"""A changed account is reported for this long: a lost message is made good by the next one."""

REPORTED_MAX: Final = 1_000
"""Accounts in one message, about 60 KB; the rest follow in the next one."""

PEERS_MAX: Final = 256

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(UsageReport)
_log = structlog.get_logger("headwater.limits")


class PeerEdge(msgspec.Struct):
    """Another edge: its incarnation, and since when, on its clock, its reports have come without a pause."""

    epoch: int
    whole_since_ms: int
    heard_s: float


class UsageReports:
    """What is sent and what is received, without the sending. Pure but for the limiter's clock."""

    def __init__(self, limiter: RateLimiter, edge: str, epoch: int) -> None:
        self._limiter = limiter
        self._edge = edge
        self._epoch = epoch
        self._until: dict[bytes, float] = {}
        self._sent_s = float("-inf")
        self._peers: dict[str, PeerEdge] = {}

    def next_report(self) -> bytes | None:
        """The message to publish now, None for none."""
        limiter, now_s = self._limiter, self._limiter.clock.monotonic_s()
        fresh, limiter.changed = limiter.changed, {}
        for key in fresh:
            # At the end: what waited longest is reported first.
            self._until.pop(key, None)
            self._until[key] = now_s + REPEAT_S
        idle = now_s - self._sent_s >= IDLE_S
        if idle:
            for running in limiter.active():
                self._until.setdefault(running.key, now_s)
        if not self._until and not idle:
            return None
        accounts: list[AccountUsage] = []
        for key in list(self._until)[:REPORTED_MAX]:
            until_s = self._until.pop(key)
            account = limiter.find(key)
            if account is None:
                continue
            accounts.append(account.usage(now_s))
            if until_s > now_s:
                self._until[key] = until_s
        self._sent_s = now_s
        report = UsageReport(self._edge, self._epoch, round(now_s * 1000), tuple(accounts))
        return _encoder.encode(report)

    def add(self, data: bytes) -> None:
        """Charge what another edge reports. What is not a report is ignored."""
        try:
            report = _decoder.decode(data)
        except msgspec.MsgspecError as error:
            _log.warning("usage_report_unreadable", reason=str(error))
            return
        if report.edge == self._edge:
            return
        limiter, now_s = self._limiter, self._limiter.clock.monotonic_s()
        peer = self._peer(report, now_s)
        if peer is None:
            return
        for usage in report.accounts:
            limits = RateLimits(max(0, usage.requests_per_minute), max(0, usage.tokens_per_minute))
            account = limiter.reported(usage.account, limits)
            if account is not None:
                whole = usage.opened_ms >= peer.whole_since_ms
                account.add_report(f"{report.edge}/{report.epoch}", usage, now_s, heard_whole=whole)

    def _peer(self, report: UsageReport, now_s: float) -> PeerEdge | None:
        peer = self._peers.get(report.edge)
        if peer is None or peer.epoch != report.epoch or now_s - peer.heard_s > STALE_S:
            if peer is None and len(self._peers) >= PEERS_MAX and not self._forget(now_s):
                return None
            peer = self._peers[report.edge] = PeerEdge(report.epoch, report.sent_ms, now_s)
        peer.heard_s = now_s
        return peer

    def _forget(self, now_s: float) -> bool:
        silent = [name for name, peer in self._peers.items() if now_s - peer.heard_s > FORGET_S]
        for name in silent:
            del self._peers[name]
        return bool(silent)


class UsageSharing:
    """The reports of this edge, and its use of those of other edges."""

    def __init__(self, bus: Bus, ns: str, edge: str, epoch: int, limiter: RateLimiter) -> None:
        self._bus = bus
        self._limiter = limiter
        self._reports = UsageReports(limiter, edge, epoch)
        self._subject = subjects.usage(ns, edge)
        self._all = subjects.usage(ns, subjects.ANY)
        self._subscription: Subscription | None = None

    async def start(self) -> None:
        """Begin to listen."""
        self._subscription = await self._bus.subscribe(self._all, self._on_report)

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            self._limiter.sweep()
            data = self._reports.next_report()
            if data is not None:
                try:
                    await self._bus.publish(self._subject, data)
                except BusError as error:
                    _log.debug("usage_not_shared", reason=str(error))
            await self._limiter.clock.sleep(SHARE_S)

    async def stop(self) -> None:
        """Listen no more."""
        if self._subscription is not None:
            await self._subscription.unsubscribe()

    async def _on_report(self, message: Message) -> None:
        self._reports.add(message.data)
