"""Hand-offs of one incarnation (prompts whose KV it keeps for another worker), and orphans, whose edge no longer waits for them.

    offered ──claimed──► granted ──done──► removed
       └──expired, released, abandoned──► KV released to the engine

The engine's parameters are granted once: to the first claim with the right prompt; every other claim is denied with
the reason. An offered hand-off can be abandoned, and expires when its lease ends, so that no KV stays pinned. After it
was granted, the two engines complete the transfer between them; the hand-off is remembered, so that a late claim is
denied for the right reason.

Reach: whether this host reaches the address at which another worker's engine hands its KV over. Engines do not ask: vLLM waits five seconds for
an answer from an address that leads nowhere, for each prompt anew, and a decode leg of SGLang five minutes. A connection tells within two
seconds, once for all prompts of the next half minute, and the refusal says what to change.

Orphans: each incarnation of an edge answers for which of its requests it still waits. No answer at all is no proof, as the edge may only be slow or
reconnect; but where no process listens for `GONE_S`, its process has ended. A request that is aborted in error costs a migration, or another
try, not an answer. Videos are not among them: a job outlives its edge (see `jobs`).
"""

import asyncio
import contextlib
import os
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Final, NamedTuple, Protocol

import msgspec
import structlog

from headwater.actors import metrics
from headwater.actors.runtime.ports import BusError, NoResponder, Ports
from headwater.engines.engine import Pinned
from headwater.schemas import subjects
from headwater.schemas.clock import Clock
from headwater.schemas.inference import (
    Choreography,
    GenerateRequest,
    Handoff,
    HandoffClaim,
    HandoffDenied,
    HandoffGranted,
    HandoffReply,
    Spent,
    StreamsQuery,
    StreamsReply,
    WaitingEdge,
    prompt_digest,
)
from headwater.schemas.names import is_loopback, split_host_port

# Whether other workers are reached.

CONNECT_S: Final = 2.0

GOOD_S: Final = 30.0
"""A place that was reached is not tried again for so long."""

BAD_S: Final = 5.0
"""The same for one that was not: its host may be back."""

PLACES_MAX: Final = 1024
"""Places remembered; the one not asked for longest is forgotten first."""


class Reach:
    """The places that were tried from here, and what came of it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._tried: OrderedDict[str, tuple[float, str]] = OrderedDict()

    async def refusal(self, worker: str, place: str) -> str:
        """Why the place (`host:port`) of a worker's KV cannot be reached, and what to do; empty where it can, and for no place."""
        if not place:
            return ""
        until_s, reason = self._tried.get(place, (0.0, ""))
        if self._clock.monotonic_s() >= until_s:
            reason = await _attempt(place)
            self._tried[place] = (self._clock.monotonic_s() + (BAD_S if reason else GOOD_S), reason)
        self._tried.move_to_end(place)
        if len(self._tried) > PLACES_MAX:
            self._tried.popitem(last=False)
        if not reason:
            return ""
        return (
            f"worker {worker} hands its KV over at {place}, which this host does not reach ({reason}): start that worker with "
            "--handoff-host and an address of its host that the others reach, and let them through its firewall"
        )


async def _attempt(place: str) -> str:
    """Connect once; why it failed, or empty."""
    host, port = split_host_port(place)
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return f"no answer within {CONNECT_S:.0f} s"
    except OSError as error:
        # asyncio's own text repeats the address; errors of names have numbers of their own.
        reason = (os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)).lower()
        return f"{reason}; it is a loopback address" if is_loopback(host) else reason
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return ""


# Hand-offs.

REMEMBERED_MAX = 4_096
"""Closed hand-offs remembered for late claims; the oldest is dropped first and is unknown from then on."""


class _Open(msgspec.Struct):
    handoff: Handoff
    request: str
    edge: tuple[str, int]
    pinned: Pinned
    expires_s: float
    is_granted: bool = False


class UnclaimedKv(NamedTuple):
    """KV that no worker will fetch, or that one has fetched from an engine that does not notice: the engine is to free it."""

    request: str
    params: bytes


class Handoffs:
    """The hand-offs of one incarnation. All times are monotonic."""

    def __init__(
        self, worker: str, clock: Clock, choreography: Choreography, *, notices_fetches: bool = True
    ) -> None:
        self._notices_fetches = notices_fetches
        self._worker = worker
        self._clock = clock
        self._choreography: Choreography = choreography
        self._epoch = 0
        self._open: dict[str, _Open] = {}
        self._by_request: dict[str, str] = {}
        self._spent: OrderedDict[str, Spent] = OrderedDict()

    def __len__(self) -> int:
        """Hand-offs that are offered, or granted and not known to be fetched."""
        return len(self._open)

    @property
    def offered(self) -> int:
        """Hand-offs that are not claimed yet."""
        return len(self._unclaimed())

    def _unclaimed(self) -> list[_Open]:
        return [one for one in self._open.values() if not one.is_granted]

    def begin_incarnation(self, epoch: int) -> list[UnclaimedKv]:
        """A new incarnation: the offers of the earlier one are void. Returns their KV."""
        unclaimed = self._close_all(list(self._open.values()), "released")
        self._epoch = epoch
        self._spent.clear()
        return unclaimed

    def offer(self, request: GenerateRequest, pinned: Pinned, name: str) -> Handoff:
        """Keep `pinned` for the worker that claims it under `name`, which must not be guessable."""
        handoff = Handoff(
            name,
            self._worker,
            self._epoch,
            prompt_digest(request.lora_name, request.cache_salt, request.tokens, request.media),
            len(request.tokens) // 4,
            round(pinned.lease_s * 1000),
            self._choreography,
        )
        expires_s = self._clock.monotonic_s() + pinned.lease_s
        edge = (request.edge, request.edge_epoch)
        self._open[name] = _Open(handoff, request.request, edge, pinned, expires_s)
        self._by_request[request.request] = name
        return handoff

    def claim(self, claim: HandoffClaim) -> HandoffReply:
        """Grant the parameters to this claim, or deny it."""
        entry = self._open.get(claim.id)
        if entry is None:
            return HandoffDenied(self._spent.get(claim.id, "unknown"))
        if entry.is_granted:
            return HandoffDenied("consumed")
        if self._clock.monotonic_s() >= entry.expires_s:
            return HandoffDenied("expired")
        if claim.prompt != entry.handoff.prompt:
            return HandoffDenied("other prompt")
        entry.is_granted = True
        return HandoffGranted(entry.pinned.params, entry.pinned.first_tokens, entry.pinned.place)

    def release(self, request: str) -> list[UnclaimedKv]:
        """The edge is done with the prefill leg `request`: its KV was fetched, or its client is gone."""
        name = self._by_request.get(request)
        return self._close_all([self._open[name]], "released") if name is not None else []

    def edges(self) -> list[tuple[str, int]]:
        """Name and epoch of each edge whose requests have hand-offs that are not claimed; without those that answer for no request."""
        return list(dict.fromkeys(entry.edge for entry in self._unclaimed() if entry.edge[1]))

    def release_edge(self, edge: tuple[str, int]) -> list[UnclaimedKv]:
        """This edge, by name and epoch, is gone: close what no worker has claimed for its requests."""
        return self._close_all([entry for entry in self._unclaimed() if entry.edge == edge], "released")

    def abandon(self) -> list[UnclaimedKv]:
        """Close all that are not claimed."""
        return self._close_all(self._unclaimed(), "released")

    def expire(self) -> list[UnclaimedKv]:
        """Close those not claimed in time, and those granted, whose KV must have been fetched by now."""
        now = self._clock.monotonic_s()
        return self._close_all([entry for entry in self._open.values() if now >= entry.expires_s], "expired")

    def _close_all(self, handoffs: list[_Open], reason: Spent) -> list[UnclaimedKv]:
        return [kv for handoff in handoffs if (kv := self._close(handoff, reason))]

    def _close(self, entry: _Open, reason: Spent) -> UnclaimedKv | None:
        del self._open[entry.handoff.id]
        self._by_request.pop(entry.request, None)
        self._spent[entry.handoff.id] = "consumed" if entry.is_granted else reason
        if len(self._spent) > REMEMBERED_MAX:
            self._spent.popitem(last=False)
        if entry.is_granted and self._notices_fetches:
            return None
        return UnclaimedKv(entry.request, entry.pinned.params)


# Orphans: no client receives their answers, so they are aborted.

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
        """Return the requests that have not ended, by edge, for edges that answer queries about theirs."""
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
    requests: RequestsByEdge = {}
    for request, waiter in waiters:
        if waiter is not None and waiter.epoch:
            requests.setdefault((waiter.edge, waiter.epoch), {})[waiter.handle] = request
    return requests


class OrphanWatch:
    """Aborts a worker's requests of all these `kinds` that no edge waits for, and releases the KV kept for an edge that is gone."""

    def __init__(self, ports: Ports, kinds: Sequence[EdgeRequests], kept_kv: KeptKv) -> None:
        self._ports = ports
        self._kinds = kinds
        self._kept = kept_kv
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
        requests: RequestsByEdge = {}
        for kind in self._kinds:
            for edge, named in kind.requests_by_edge().items():
                requests.setdefault(edge, {}).update(named)
        # An edge without requests here is asked whether it is there.
        for edge in self._kept.edges_of_kept_kv():
            requests.setdefault(edge, {})
        return requests

    async def _check(self, edge: Edge, requests: Mapping[int, str]) -> None:
        """`requests` by handle."""
        handles = tuple(islice(requests, HANDLES_MAX))
        subject = subjects.edge_streams(self._ports.ns, *edge)
        now_s = self._ports.clock.monotonic_s()
        try:
            data = await self._ports.bus.request(
                subject, _encode(StreamsQuery(handles)), timeout_s=REPLY_S_MAX
            )
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
            running = set(kind.requests_by_edge().get(edge, {}).values()) - self._aborted
            ended = [request for request in requests if request in running]
            if ended:
                aborted += len(ended)
                self._aborted.update(ended)
                kind.abort(ended)
        if aborted:
            _log.warning("orphans_aborted", edge=edge[0], epoch=edge[1], requests=aborted, reason=reason)
            metrics.ORPHANS.inc(aborted)
