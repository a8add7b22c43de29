"""The parts of an edge that its endpoints share, and one HTTP call to them."""

import asyncio
import re
from collections.abc import Callable, Coroutine
from typing import Any, Final, NamedTuple, TypeVar

import structlog

from headwater.actors.edge.admit.limiter import NO_QUOTA, RequestQuota, time_limit_reached
from headwater.actors.edge.admit.principal import ANONYMOUS, Principal, permitted_model
from headwater.actors.edge.admit.salts import CacheSalts
from headwater.actors.edge.model.catalog import Model, ModelCatalog
from headwater.actors.edge.saga.fields import FieldChecker
from headwater.actors.edge.saga.open_requests import OpenRequests
from headwater.actors.edge.saga.picked import Picked
from headwater.actors.edge.saga.record import RequestLogWriter
from headwater.actors.edge.saga.routing_hints import tenant_of
from headwater.actors.edge.saga.workers import WorkerRegistry
from headwater.actors.edge.settings import EdgeSettings
from headwater.actors.http.asgi import ClientGone, Disconnect, Headers, Receive, Scope, Send
from headwater.actors.http.errors import overloaded
from headwater.actors.media.intake import MediaIntake, TenantIntake
from headwater.schemas.trace import NO_TRACE, TraceContext

T = TypeVar("T")

_TRACEPARENT = re.compile(
    rb"(?P<version>(?!ff)[0-9a-f]{2})-(?P<trace>(?!0{32})[0-9a-f]{32})-(?P<span>(?!0{16})[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})"
    rb"(?P<more>-.*)?"
)
_TRACESTATE = re.compile(rb"[\x20-\x7e\t]{1,512}")
"""What is passed on of a client's `tracestate`: the length that W3C Trace Context asks for at least."""

SAMPLED: Final = 1


NO_SALTS: Final = CacheSalts()
"""Salts without authentication: the clients' own."""


class Call(NamedTuple):
    """One POST: its body, its W3C trace context, its ASGI channels, its headers, its sender, what that may use, http or https, when its
    body was here by the monotonic clock, and the decision that it came with.
    """

    body: bytes
    trace: TraceContext
    receive: Receive
    send: Send
    headers: Headers
    principal: Principal = ANONYMOUS
    quota: RequestQuota = NO_QUOTA
    scheme: str = "http"
    arrived_s: float = 0.0
    picked: Picked | None = None

    def make_id(self, ids: Callable[[], str]) -> str:
        """The id of its request: the one that it was decided under, or a new one."""
        return self.picked.id if self.picked is not None else ids()


class Serving(NamedTuple):
    """The parts of one edge. `salts` keep the cached prompts of tenants apart. `intake` fetches and decodes media, None: there is text only."""

    workers: WorkerRegistry
    models: ModelCatalog
    ledger: OpenRequests
    fields: FieldChecker
    settings: EdgeSettings = EdgeSettings()
    salts: CacheSalts = NO_SALTS
    intake: MediaIntake | None = None

    def intake_of(self, headers: Headers, principal: Principal) -> TenantIntake | None:
        """The media intake for the items of a client's call. Raises `ApiError` 400 for a header that names no tenant."""
        if self.intake is None:
            return None
        return TenantIntake(self.intake, tenant_of(headers, principal))

    def model(self, name: str, principal: Principal) -> Model:
        """The model that a request names. Raises `ApiError` 403 and 404."""
        return permitted_model(self.models, principal, name)

    def record(
        self, request: str, model: Model, endpoint: str, call: Call, *, answers: int = 0
    ) -> RequestLogWriter:
        """The account of a request, which log lines of this task are about from now on. `answers` counts the texts that it returns."""
        record = RequestLogWriter(
            self.ledger,
            self.workers.ports.clock,
            request,
            model.card.name,
            endpoint,
            payload=self.settings.record_payloads,
            trace=call.trace,
            arrived_s=call.arrived_s,
            answers=answers,
        )
        structlog.contextvars.bind_contextvars(**record.log_fields)
        return record

    async def compute(
        self, call: Call, record: RequestLogWriter, tokens: int, work: Coroutine[Any, Any, T]
    ) -> T:
        """The result of `work` for a request of so many tokens that was accepted, unless its client disconnects before.

        The end of the request is recorded, whatever happens. Raises what `work` does, `ApiError` 504 at the time limit, and
        `ClientGone`.
        """
        with record.ending(ClientGone):
            client = Disconnect(call.receive)
            running = asyncio.ensure_future(work)
            try:
                call.quota.settle(tokens)
                if await client.or_done(running, self.settings.request_timeout_s or None):
                    raise ClientGone
                if not running.done():
                    raise time_limit_reached(self.settings.request_timeout_s)
                return running.result()
            finally:
                client.stop()
                if not running.done():
                    running.cancel()
                    await asyncio.gather(running, return_exceptions=True)

    def require_open(self) -> None:
        """Raises `ApiError` 503 while no request can be accepted."""
        if self.workers.closed:
            raise overloaded("This edge is restarting; retry.", 1.0)
        if not self.ledger.takes_requests:
            raise overloaded("Request log is unavailable; retry.", 1.0)


def trace_of(scope: Scope) -> TraceContext:
    """The W3C trace context of a request, empty where it has no `traceparent`, or a malformed one. A malformed `tracestate` is left out."""
    parent: re.Match[bytes] | None = None
    state = b""
    for name, value in scope["headers"]:
        if name == b"traceparent" and parent is None:
            parent = _TRACEPARENT.fullmatch(value)
            # Only versions after 00 may have further fields after the flags.
            if parent is None or (parent["version"] == b"00" and parent["more"]):
                return NO_TRACE
        elif name == b"tracestate":
            state = state + b"," + value if state else value
    if parent is None:
        return NO_TRACE
    return TraceContext(
        parent["trace"].decode(),
        parent["span"].decode(),
        bool(int(parent["flags"], 16) & SAMPLED),
        state.decode() if _TRACESTATE.fullmatch(state) else "",
    )
