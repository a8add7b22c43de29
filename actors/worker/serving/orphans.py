"""Orphans: requests of an edge that is gone, or whose cancellation was lost. No client receives their answers, so they are aborted.

Each incarnation of an edge answers for which of its requests it still waits. No answer at all is no proof, as the edge may only be slow or
reconnect; but where no process listens for `GONE_S`, its process has ended. A request that is aborted in error costs a migration, or another
try, not an answer. Videos are not among them: a job outlives its edge (see `file_jobs`).
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Final, Protocol

import msgspec
import structlog

from headwater.actors import metrics
from headwater.actors.bus.port import BusError, NoResponder
from headwater.actors.runtime.ports import Ports
from headwater.schemas import subjects
from headwater.schemas.messages.inference import StreamsQuery, StreamsReply, WaitingEdge

CHECK_PERIOD_S: Final = 2.0
REPLY_S_MAX: Final = 1.0

GONE_S: Final = 6.0
"""Longer than a connection to NATS takes to be there again after a restart of the server."""

HANDLES_MAX: Final = 4_096
"""Requests in one query; further ones are asked about once some of these have ended."""

_encode = msgspec.msgpack.Encoder().encode
_reply = msgspec.msgpack.Decoder(StreamsReply)
_log = structlog.get_logger("headwater.orphans")

Edge = tuple[str, int]
"""Name and epoch."""

RequestsByEdge = dict[Edge, dict[int, str]]
"""Names of requests by handle, by the edge that waits for them. An edge gives each of its requests, of whatever kind, a handle of its own."""


class EdgeRequests(Protocol):
    """The requests of one kind that a worker has."""

    def requests_by_edge(self) -> RequestsByEdge:
        """Those that have not ended, of edges that answer for theirs."""
        ...

    def abort(self, requests: Sequence[str]) -> None:
        """Abort those that no client waits for any more."""
        ...


class KeptKv(Protocol):
    """The KV of prompts that a worker keeps until another worker claims it for an edge's request."""

    def edges_of_kept_kv(self) -> list[Edge]:
        """The edges of those requests that answer for theirs."""
        ...

    def release_kept_kv(self, edge: Edge) -> int:
        """Release what no worker has claimed. Returns for how many requests."""
        ...


def by_edge(waiters: Iterable[tuple[str, WaitingEdge | None]]) -> RequestsByEdge:
    """The requests whose `waiter` answers for them."""
    found: RequestsByEdge = {}
    for request, waiter in waiters:
        if waiter is not None and waiter.epoch:
            found.setdefault((waiter.edge, waiter.epoch), {})[waiter.handle] = request
    return found


class OrphanWatch:
    """One per worker: it aborts the requests, of all these `kinds`, for which no edge waits, and releases the KV kept for an edge that is gone."""

    def __init__(self, ports: Ports, kinds: Sequence[EdgeRequests], kept: KeptKv) -> None:
        self._ports = ports
        self._kinds = kinds
        self._kept = kept
        self._silent_since_s: dict[Edge, float] = {}
        """Edges for which no process listens, and since when that is known."""
        self._aborted: set[str] = set()
        """Requests that were aborted and have not ended: an engine may take its time."""

    async def run(self) -> None:
        """Check all requests again and again. Until cancelled."""
        while True:
            await self._ports.clock.sleep(CHECK_PERIOD_S)
            requests = self._requests()
            self._aborted.intersection_update(name for named in requests.values() for name in named.values())
            self._silent_since_s = {edge: at for edge, at in self._silent_since_s.items() if edge in requests}
            await asyncio.gather(*(self._check(edge, named) for edge, named in requests.items()))

    def _requests(self) -> RequestsByEdge:
        found: RequestsByEdge = {}
        for kind in self._kinds:
            for edge, named in kind.requests_by_edge().items():
                found.setdefault(edge, {}).update(named)
        # An edge without requests here is asked whether it is there.
        for edge in self._kept.edges_of_kept_kv():
            found.setdefault(edge, {})
        return found

    async def _check(self, edge: Edge, requests: Mapping[int, str]) -> None:
        """`requests` by handle."""
        asked = tuple(islice(requests, HANDLES_MAX))
        subject = subjects.edge_streams(self._ports.ns, *edge)
        now_s = self._ports.clock.monotonic_s()
        try:
            data = await self._ports.bus.request(subject, _encode(StreamsQuery(asked)), timeout_s=REPLY_S_MAX)
            ended = _reply.decode(data).ended
        except NoResponder:
            if now_s - self._silent_since_s.setdefault(edge, now_s) >= GONE_S:
                self._end(edge, list(requests.values()), "no process responds for it")
                if released := self._kept.release_kept_kv(edge):
                    _log.warning("orphaned_kv_released", edge=edge[0], epoch=edge[1], requests=released)
            return
        except (BusError, msgspec.DecodeError) as error:
            _log.debug("streams_unanswered", edge=edge[0], epoch=edge[1], reason=str(error))
            return
        self._silent_since_s.pop(edge, None)
        self._end(edge, [requests[handle] for handle in ended if handle in requests], "it has ended them")

    def _end(self, edge: Edge, requests: Sequence[str], reason: str) -> None:
        aborted = 0
        for kind in self._kinds:
            # Some may have ended since they were asked about.
            left = set(kind.requests_by_edge().get(edge, {}).values()) - self._aborted
            ended = [request for request in requests if request in left]
            if ended:
                aborted += len(ended)
                self._aborted.update(ended)
                kind.abort(ended)
        if aborted:
            _log.warning("orphans_aborted", edge=edge[0], epoch=edge[1], requests=aborted, reason=reason)
            metrics.ORPHANS.inc(aborted)
