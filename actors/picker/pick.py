"""From a request to the endpoint that serves it: the request is read as an edge reads it, and the router decides as for an edge.

Of a request to generate, the picker makes the prompt and asks a router with the edge's own code: same token ids, same hashes, same
query, and a decision in the pool's log as any other. The decision travels with the request (`headwater.actors.edge.saga.http_call`), so that the
edge at the endpoint sends it where it was decided.

Whatever the picker cannot decide an edge can: requests that generate nothing, or media, or that are invalid. Those get the next endpoint
in turn; the edge there answers, errors included, in the form of the client's API.

The endpoints of a fleet are known from the leases of its workers.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import structlog

from headwater.actors.edge.admit.control import AccessControl
from headwater.actors.edge.answer.run import Generator, first_choice
from headwater.actors.edge.apis.anthropic import check_version
from headwater.actors.edge.apis.anthropic_translate import to_generation
from headwater.actors.edge.apis.anthropic_types import MessagesRequest, decode_fields
from headwater.actors.edge.apis.chat import chat_request, completion_request
from headwater.actors.edge.apis.chat_types import ChatRequest, CompletionRequest
from headwater.actors.edge.prompt.prepare import Prepared
from headwater.actors.edge.prompt.request import GenerationRequest
from headwater.actors.edge.saga.http_call import Call, DecisionSeal, Picked, RoutingHints, Serving, trace_of
from headwater.actors.edge.saga.placement import (
    Addressed,
    Dispatcher,
    MessagePlacement,
    TokenSequence,
    withdraw,
)
from headwater.actors.http.asgi import Headers
from headwater.actors.http.body import check_shape, decode_body
from headwater.actors.http.errors import ApiError, overloaded
from headwater.actors.runtime.tables import LeaseTable
from headwater.events.table import Table
from headwater.schemas.inference import Refused
from headwater.schemas.routing import Decision
from headwater.schemas.tables import Lease

BEGINS: Final = ("whole", "prefill")
"""What a worker must serve for a request to begin there."""

FOUND_MAX: Final = 256

Subset = frozenset[str] | None
"""The endpoints that a gateway allows, None for all."""


class _Found(NamedTuple):
    """The endpoints of a pool that are allowed, each once; and its incarnations that have none of them."""

    endpoints: tuple[str, ...]
    unreachable: tuple[str, ...]


class Endpoints:
    """Kept current by `run`; `known` is set once the present leases are read, and `on_pools_changed` called when a pool's workers change."""

    def __init__(self, leases: Table) -> None:
        self.known = asyncio.Event()
        self.on_pools_changed: Callable[[], None] = lambda: None
        self._table = LeaseTable(leases)
        self._workers: dict[str, Lease] = {}
        self._routers: dict[str, Lease] = {}
        self._turn = 0
        self._found: dict[tuple[str, Subset], _Found] = {}
        """What follows from the present leases, by pool and subset: requests ask more often than leases change."""

    async def run(self) -> None:
        """Follow the lease table. Does not return."""
        async for changes in self._table.watch():
            for kind, name, lease in changes:
                if kind == "worker" and lease != self._workers.get(name):
                    self._set(self._workers, name, lease)
                    self._found.clear()
                    self.on_pools_changed()
                elif kind == "router":
                    self._set(self._routers, name, lease)
            self.known.set()

    @staticmethod
    def _set(held: dict[str, Lease], name: str, lease: Lease | None) -> None:
        if lease is not None and lease.epoch:
            held[name] = lease
        else:
            held.pop(name, None)

    def has_workers(self, pool: str) -> bool:
        """Has a pool any worker that serves?"""
        return any(lease.pool == pool and lease.serves for lease in self._workers.values())

    def of(self, worker: str, subset: Subset = None) -> str:
        """The endpoint of a worker, "" if it has none or the subset lacks it."""
        lease = self._workers.get(worker)
        return lease.endpoint if lease is not None and _is_allowed(lease, subset) else ""

    def of_pool(self, pool: str, subset: Subset = None) -> tuple[str, ...]:
        """The endpoints at which a request to a pool may begin, each once; of any pool for "". Each call begins with the next one."""
        every = self._of(pool, subset).endpoints
        self._turn += 1
        first = self._turn % len(every) if every else 0
        return (*every[first:], *every[:first])

    def unreachable(self, pool: str, subset: Subset = None) -> tuple[str, ...]:
        """The incarnations of a pool's workers that a gateway cannot send to, as `Constraints.exclude` has them."""
        return self._of(pool, subset).unreachable

    def _of(self, pool: str, subset: Subset) -> "_Found":
        endpoints = self._found.get((pool, subset))
        if endpoints is None:
            begins = [
                (name, lease)
                for name, lease in sorted(self._workers.items())
                if pool in ("", lease.pool) and lease.serves in BEGINS
            ]
            allowed = [lease.endpoint for _, lease in begins if _is_allowed(lease, subset)]
            others = [f"{name}.{lease.epoch}" for name, lease in begins if not _is_allowed(lease, subset)]
            endpoints = _Found(tuple(dict.fromkeys(allowed)), tuple(others))
            if len(self._found) >= FOUND_MAX:
                self._found.clear()
            self._found[pool, subset] = endpoints
        return endpoints

    def routers(self, pool: str) -> Sequence[tuple[str, int]]:
        """Names and epochs of a pool's routers."""
        return [(name, lease.epoch) for name, lease in self._routers.items() if lease.pool == pool]


def _is_allowed(lease: Lease, subset: Subset) -> bool:
    return bool(lease.endpoint) and (subset is None or lease.endpoint in subset)


ENDPOINTS_MAX: Final = 3
"""Endpoints in an answer: the one that was picked, and those that a gateway tries after it."""

RETRY_S: Final = 1.0

Reader = Callable[[Headers, bytes], GenerationRequest]

_log = structlog.get_logger("headwater.picker")


class Asked(NamedTuple):
    """A request as a gateway shows it. `subset` are the endpoints that it allows."""

    method: str
    path: str
    headers: Headers
    body: bytes
    subset: Subset = None


class Pick(NamedTuple):
    """The endpoints of a request, the best first. Where a router decided, `sealed` is its decision for the edge at the endpoint."""

    endpoints: tuple[str, ...]
    sealed: bytes = b""
    decided: Picked | None = None


class NotGenerating(Exception):
    """The request is none that a router decides here."""


def _messages(headers: Headers, body: bytes) -> GenerationRequest:
    check_version(headers)
    return to_generation(decode_fields(MessagesRequest, body))


READERS: Final[dict[str, Reader]] = {
    "/v1/chat/completions": lambda _, body: chat_request(decode_body(ChatRequest, body)),
    "/v1/completions": lambda _, body: completion_request(decode_body(CompletionRequest, body)),
    "/v1/messages": _messages,
}
"""How the requests that a router decides are read, by path."""


class Picker:
    """Picks endpoints for the requests of gateways."""

    def __init__(
        self, serving: Serving, access: AccessControl, endpoints: Endpoints, seal: DecisionSeal
    ) -> None:
        self._serving = serving
        self._generator = Generator(serving)
        self._access = access
        self._endpoints = endpoints
        self._seal = seal
        self.clock = serving.workers.ports.clock
        self.sees_responses = False
        """Set once a gateway has said that a response began: they all do, or are all configured not to."""

    async def pick(self, gateway_request: Asked) -> Pick:
        """Pick the endpoints of a request. Cancelling the call takes it out of a router's queue.

        Raises `ApiError`: 503 if no endpoint serves, and what a router refuses with, such as 429.
        """
        try:
            prepared, hints = await self._read(gateway_request)
        except (ApiError, NotGenerating) as error:
            _log.debug("pick_undecided", path=gateway_request.path, reason=str(error))
            return self.next_in_turn(gateway_request.subset)
        pool = prepared.model.card.pool
        if not self._endpoints.of_pool(pool, gateway_request.subset):
            raise _no_endpoint(gateway_request.subset, f" for {prepared.model.card.name}")
        id_ = self._serving.workers.ports.ids()
        decision = await self._decide(prepared, prepared.request.id_prefix + id_, hints, gateway_request)
        picked = Picked(id_, pool, decision)
        endpoints = self._in_order(decision, pool, gateway_request.subset)
        return Pick(endpoints, self._seal.seal(picked), picked)

    def next_in_turn(self, subset: Subset) -> Pick:
        """Pick without a decision. Raises `ApiError` 503."""
        endpoints = self._endpoints.of_pool("", subset)[:ENDPOINTS_MAX]
        if not endpoints:
            raise _no_endpoint(subset)
        return Pick(endpoints)

    def withdraw(self, pick: Pick) -> None:
        """The request of a pick does not arrive at its worker: its load counts no more. Does not wait."""
        if pick.decided is not None:
            pool, attempt = pick.decided.pool, pick.decided.decision.request
            withdraw(self._serving.workers, pool, attempt, self._endpoints.routers(pool))

    async def _read(self, gateway_request: Asked) -> tuple[Prepared, RoutingHints]:
        """The prompt of a request, and what its headers say about routing. Raises `ApiError`, and `NotGenerating`."""
        read = READERS.get(gateway_request.path)
        if read is None or gateway_request.method != "POST":
            raise NotGenerating("a router decides no such request")
        scope = {
            "path": gateway_request.path,
            "method": gateway_request.method,
            "headers": gateway_request.headers,
        }
        principal = await self._access.admit(scope)
        await check_shape(gateway_request.body)
        request = read(gateway_request.headers, gateway_request.body)
        call = Call(
            gateway_request.body, trace_of(scope), _never, _never_send, gateway_request.headers, principal
        )
        prepared = await self._generator.prepare(request, call)
        if not prepared.prompts or prepared.media:
            raise NotGenerating("a prompt with media is the edge's to decide")
        return prepared, self._generator.hints(request, call)

    async def _decide(
        self, prepared: Prepared, name: str, hints: RoutingHints, gateway_request: Asked
    ) -> Decision:
        """The router's decision for the first choice of a request, found as an edge finds it. Raises `ApiError`."""
        card, spec = prepared.model.card, first_choice(prepared, name)
        trace = trace_of({"headers": gateway_request.headers})
        dispatcher = Dispatcher(self._serving.workers, card.pool, hints, trace)
        prompt = TokenSequence(
            prepared.prompts[0], card.block_size, spec.constraints.lora_name, spec.cache_salt
        )
        tokens, hashes = prompt.extend([])
        message = Addressed(
            name, spec.index, len(tokens), spec.constraints, hashes, max_tokens=spec.sampling.max_tokens
        )
        placement = MessagePlacement[Decision](
            dispatcher, message, lambda: self._endpoints.unreachable(card.pool, gateway_request.subset)
        )

        async def follow(decision: Decision, _attempt: str) -> Decision | Refused:
            if self._endpoints.of(decision.worker, gateway_request.subset):
                return decision
            # It joined after the query was made.
            return Refused(f"worker {decision.worker} has no endpoint that the gateway allows", True)

        return await placement.deliver(follow)

    def _in_order(self, decision: Decision, pool: str, subset: Subset) -> tuple[str, ...]:
        """The endpoint of the worker that was chosen, then those of the next best."""
        others = sorted(decision.candidates, key=lambda candidate: candidate.score)
        named = [decision.worker, *(candidate.worker for candidate in others)]
        endpoints = [self._endpoints.of(worker, subset) for worker in named]
        every = dict.fromkeys([*endpoints, *self._endpoints.of_pool(pool, subset)])
        return tuple(endpoint for endpoint in every if endpoint)[:ENDPOINTS_MAX]


def _no_endpoint(subset: Subset, purpose: str = "") -> ApiError:
    among = "" if subset is None else f" among the {len(subset)} that the gateway allows"
    return overloaded(
        f"No endpoint is ready{purpose}{among}: workers name theirs with --endpoint, and serve once they have joined.",
        RETRY_S,
    )


async def _never() -> dict[str, object]:
    raise AssertionError("a picker reads no more of a request")


async def _never_send(message: dict[str, object]) -> None:
    raise AssertionError("a picker answers no request")
