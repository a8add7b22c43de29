"""One HTTP call to an edge: the parts of the edge that endpoints share, its routing hints, and the router's decision where it comes with one.

    x-headwater-session, x-session-id    session affinity, under a policy that uses it, and for engine weights; without
                                         either, a digest of OpenAI's `prompt_cache_key` field, the conversation's
                                         id, or else the `user` field
    x-headwater-policy                   routing policy instead of the router's default, of those that clients may choose
    x-headwater-router-temperature       randomness of the choice, from 0 up to a configured bound
    x-headwater-worker                   only this worker (policy direct), where clients may choose one
    x-headwater-engine                   only workers of this engine, where clients may choose a worker
    x-headwater-revision                 only workers of this revision, where clients may choose a worker
    x-headwater-tier                     only workers of this tier
    x-headwater-tolerates                taints that the worker may have, separated by commas
    x-headwater-tenant                   tenant for queue fairness; without it, a digest of the API key
    x-headwater-deadline-ms              milliseconds for the first token; the request is refused if that cannot be met
    priority (a field of the body)       lower is served first; passed to the engine too, if it supports priorities

With authentication, the tenant is that of the credential: x-headwater-tenant may repeat it and not differ from it. The
tier, the worker, its engine and revision, tolerations, the policy, its temperature and the priority each require a scope, and
sessions of different tenants are different sessions. Without authentication any client may send any of these; a gateway can remove them.
"""

import asyncio
import hmac
import math
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from hashlib import blake2b, sha256
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import parse_qsl

import msgspec
import structlog

from headwater.actors.edge.admit.control import (
    ANONYMOUS,
    CacheSalts,
    Principal,
    namespace_key,
    permitted_model,
)
from headwater.actors.edge.admit.limiter import NO_QUOTA, RequestQuota, time_limit_reached
from headwater.actors.edge.catalog import Model, ModelCatalog
from headwater.actors.edge.saga.fields import FieldChecker
from headwater.actors.edge.saga.record import OpenRequests, RequestLogWriter
from headwater.actors.edge.saga.workers import WorkerRegistry
from headwater.actors.edge.settings import ClientLimits, EdgeSettings
from headwater.actors.http.asgi import ClientGone, Disconnect, Headers, Receive, Scope, Send, respond
from headwater.actors.http.errors import ApiError, bad_request, forbidden, method_not_allowed, overloaded
from headwater.actors.media.intake import MediaIntake, TenantIntake
from headwater.engines.logs import failure_place
from headwater.events.ports import LogError
from headwater.events.table import Table
from headwater.schemas.clock import Clock
from headwater.schemas.names import NO_TRACE, InvalidName, TraceContext, token
from headwater.schemas.routing import (
    NO_CONSTRAINTS,
    NO_FLOW_CONTROL,
    NO_PREFERENCES,
    Constraints,
    Decision,
    FlowControl,
    Preferences,
    RouteQuery,
)
from headwater.schemas.tables import Permission

DIRECT: Final = "direct"
"""The policy of requests that name their worker."""

TEXT_MAX: Final = 256
TOLERATES_MAX: Final = 16
DEADLINE_MS_MAX: Final = 86_400_000


class RoutingHints(NamedTuple):
    """Constraints, preferences and flow control as the client stated them. `flow.deadline_ms` counts from the request's arrival."""

    constraints: Constraints = NO_CONSTRAINTS
    preferences: Preferences = NO_PREFERENCES
    flow: FlowControl = NO_FLOW_CONTROL

    def apply_to(self, query: RouteQuery, *, passed_s: float, waits: bool) -> RouteQuery:
        """The query with these hints, `passed_s` after the request arrived. Constraints that the query has already win.

        A query that may not wait (`waits`) belongs to a request that a worker had before: its deadline no longer matters. The
        worker that a client chose does its first leg only, and its images go to whatever encode worker that one reads from.
        """
        flow, hinted, preferences = self.flow, self.constraints, self.preferences
        if hinted is NO_CONSTRAINTS and not flow.deadline_ms:
            flow = msgspec.structs.replace(flow, waits=waits)
            return msgspec.structs.replace(query, preferences=preferences, flow=flow)
        deadline_ms = 0
        if flow.deadline_ms and waits:
            deadline_ms = max(1, flow.deadline_ms - round(passed_s * 1_000.0))
        if "encode" in query.constraints.needs:
            hinted = msgspec.structs.replace(hinted, pinned="", engine="", revision="")
        elif hinted.pinned:
            if query.constraints.leg == "decode":
                hinted = msgspec.structs.replace(hinted, pinned="")
            else:
                preferences = msgspec.structs.replace(preferences, policy=DIRECT)
        return msgspec.structs.replace(
            query,
            constraints=_override(hinted, query.constraints),
            preferences=preferences,
            flow=msgspec.structs.replace(flow, deadline_ms=deadline_ms, waits=waits),
        )


NO_HINTS: Final = RoutingHints()

_CONSTRAINTS: Final = Constraints.__struct_fields__


def _override(hinted: Constraints, explicit: Constraints) -> Constraints:
    """`explicit`, with the hint for every constraint that it leaves open."""
    return Constraints(**{name: getattr(explicit, name) or getattr(hinted, name) for name in _CONSTRAINTS})


def parse_routing_headers(
    headers: Headers,
    limits: ClientLimits,
    principal: Principal = ANONYMOUS,
    *,
    user: str | None = None,
    session: str | None = None,
    priority: int | None = None,
    opening: str = "",
) -> RoutingHints:
    """The hints in a request's headers and fields. `opening` is how its conversation begins.

    Raises `ApiError` that names the header at fault: 400, and 403 where its sender may not choose.
    """
    reader = _HeaderReader(headers)
    if principal.authenticated:
        _require_scopes(reader, principal, priority)
    flow = FlowControl(priority=priority or 0, tenant=_tenant(reader, principal))
    conversation = _digest("opening", f"{principal.tenant} {opening}".encode()) if opening else ""
    if reader.is_silent and not user and not session:
        preferences = Preferences(conversation=conversation) if conversation else NO_PREFERENCES
        return RoutingHints(preferences=preferences, flow=flow)
    affinity = reader.text("x-headwater-session") or reader.text("x-session-id")
    if not affinity and session:
        affinity = _digest("cache", session.encode())
    if not affinity and user:
        affinity = _digest("user", user.encode())
    if affinity and principal.authenticated:
        affinity = _digest("session", f"{principal.tenant} {affinity}".encode())
    return RoutingHints(
        Constraints(
            pinned=_pinned(reader, limits, "x-headwater-worker"),
            tier=reader.name("x-headwater-tier"),
            tolerates=reader.names("x-headwater-tolerates"),
            engine=_pinned(reader, limits, "x-headwater-engine"),
            revision=_pinned(reader, limits, "x-headwater-revision"),
        ),
        Preferences(
            policy=reader.one_of("x-headwater-policy", limits.policies),
            temperature=reader.number("x-headwater-router-temperature", limits.temperature_max),
            session=affinity,
            conversation=conversation,
        ),
        msgspec.structs.replace(flow, deadline_ms=reader.count("x-headwater-deadline-ms", DEADLINE_MS_MAX)),
    )


def tenant_of(headers: Headers, principal: Principal) -> str:
    """The tenant that a request counts for. Raises `ApiError` 400 that names the header."""
    return _tenant(_HeaderReader(headers), principal)


def _tenant(reader: "_HeaderReader", principal: Principal) -> str:
    return principal.tenant or reader.text("x-headwater-tenant") or _tenant_by_key(reader)


_OURS: Final = (b"x-headwater-", b"x-session-id", b"authorization")
"""What the names of the headers above begin with, and that of the API key."""

_OF_TENANTS: Final = frozenset({b"x-headwater-tenant", b"authorization"})

SCOPES: Final[tuple[tuple[str, Permission], ...]] = (
    ("x-headwater-tier", "tier"),
    ("x-headwater-worker", "worker"),
    ("x-headwater-engine", "worker"),
    ("x-headwater-revision", "worker"),
    ("x-headwater-tolerates", "toleration"),
    ("x-headwater-policy", "policy"),
    ("x-headwater-router-temperature", "policy"),
)
"""Headers that override a decision of the router, and the scope that each requires."""


def _require_scopes(reader: "_HeaderReader", principal: Principal, priority: int | None) -> None:
    for header, permission in SCOPES:
        if reader.has(header):
            principal.require(permission, header)
    if priority:
        principal.require("priority", "priority")
    if reader.has("x-headwater-tenant") and reader.text("x-headwater-tenant") != principal.tenant:
        raise forbidden(
            "x-headwater-tenant is not the tenant of this key. The tenant comes from the key; leave the header out.",
            param="x-headwater-tenant",
        )


def _pinned(reader: "_HeaderReader", limits: ClientLimits, header: str) -> str:
    """The worker, engine or revision that a header names."""
    name = reader.text(header) if header == "x-headwater-revision" else reader.name(header)
    if name and DIRECT not in limits.policies:
        raise bad_request(
            f"{header}: clients of this edge may not choose a worker (--client-policies lacks {DIRECT}).",
            param=header,
        )
    return name


class _HeaderReader:
    """A request's headers about routing, by name. A missing header reads as empty."""

    def __init__(self, headers: Headers) -> None:
        self._raw: dict[bytes, bytes] = {}
        for name, value in headers:
            if name.startswith(_OURS):
                self._raw.setdefault(name, value)

    @property
    def is_silent(self) -> bool:
        """Return whether the headers name a tenant at most, as those of most requests do."""
        return self._raw.keys() <= _OF_TENANTS

    def raw(self, name: str) -> bytes:
        return self._raw.get(name.encode(), b"")

    def has(self, name: str) -> bool:
        return name.encode() in self._raw

    def text(self, name: str) -> str:
        raw = self._raw.get(name.encode())
        if raw is None:
            return ""
        value = raw.decode("latin-1").strip()
        if not value or len(value) > TEXT_MAX or not (value.isascii() and value.isprintable()):
            raise bad_request(f"{name} must be 1 to {TEXT_MAX} printable ASCII characters.", param=name)
        return value

    def name(self, name: str) -> str:
        value = self.text(name)
        return _checked(value, name) if value else ""

    def names(self, name: str) -> tuple[str, ...]:
        value = self.text(name)
        listed = (
            tuple(dict.fromkeys(_checked(part.strip(), name) for part in value.split(","))) if value else ()
        )
        if len(listed) > TOLERATES_MAX:
            raise bad_request(f"{name} takes at most {TOLERATES_MAX} names, got {len(listed)}.", param=name)
        return listed

    def one_of(self, name: str, allowed: Sequence[str]) -> str:
        value = self.text(name)
        if value and value not in allowed:
            which = ", ".join(allowed) or "none: clients of this edge may not choose a policy"
            raise bad_request(f"{name} is {value!r}. Allowed are {which}.", param=name)
        return value

    def number(self, name: str, most: float) -> float:
        value = self.text(name)
        if not value:
            return -1.0
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not 0.0 <= number <= most:
            raise bad_request(f"{name} is {value!r}. Allowed are numbers from 0 to {most:g}.", param=name)
        return number

    def count(self, name: str, most: int) -> int:
        value = self.text(name)
        if not value:
            return 0
        if not (value.isdigit() and 1 <= int(value[:12]) <= most):
            raise bad_request(
                f"{name} is {value!r}. Allowed are milliseconds from 1 to {most}, as a whole number.",
                param=name,
            )
        return int(value)


def _checked(value: str, name: str) -> str:
    try:
        return token(name, value)
    except InvalidName as error:
        raise bad_request(f"{error}.", param=name) from error


def _tenant_by_key(reader: _HeaderReader) -> str:
    scheme, _, key = reader.raw("authorization").partition(b" ")
    return _digest("key", key.strip()) if scheme.lower() == b"bearer" and key.strip() else ""


def _digest(kind: str, secret: bytes) -> str:
    # Keys and user names must not reach a router or a log.
    return f"{kind}-{blake2b(secret, digest_size=8).hexdigest()}"


# Requests that come with the router's decision: an endpoint picker has asked for it, and the gateway sends it along in a header, which
# has the decision as the pool log has it, less what only a recomputation needs, under a message authentication code whose key edges and
# pickers derive from the namespace key. So a client cannot choose a worker, and an edge that gets a request from a gateway does not decide
# again: what the picker decided is what happens. A decision is followed once, for the prompt that it was made for (`ChoiceMessages.fits`),
# within `DECISION_AGE_S_MAX`. The second attempt of a gateway (`x-envoy-attempt-count`) follows none: the first may have reached another edge.

DECISION_HEADER: Final = b"x-headwater-decision"
ATTEMPT_COUNT: Final = b"x-envoy-attempt-count"

DECISION_AGE_S_MAX: Final = 60.0
"""Seconds from the decision until an edge has the request. A body of the greatest size takes a fraction of it."""

DECISIONS_REMEMBERED_MAX: Final = 65_536
"""Decisions that an edge remembers to have followed: more than it gets within `DECISION_AGE_S_MAX`."""

CODE_BYTES: Final = 16
_DOMAIN: Final = b"headwater picked"

_log = structlog.get_logger("headwater.picked")
_edge_log = structlog.get_logger("headwater.edge")


class Picked(msgspec.Struct, frozen=True, array_like=True):
    """A decision that comes with a request. `id` is the request's, as an edge would make it up; `pool` is where it was decided."""

    id: str
    pool: str
    decision: Decision

    @property
    def attempt(self) -> int:
        """The number of the attempt that the decision was made for: the end of its name."""
        return int(self.decision.request.rpartition("-")[2])


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Picked).decode


class DecisionSeal:
    """Writes and reads the header, with the key in the table of shared secrets."""

    def __init__(self, secrets: Table, clock: Clock) -> None:
        self._secrets = secrets
        self._clock = clock
        self._key = b""
        self._followed: OrderedDict[str, None] = OrderedDict()

    async def load(self) -> None:
        """Read the key. Raises `LogError`."""
        if not self._key:
            self.derive(await namespace_key(self._secrets))

    def derive(self, key: bytes) -> None:
        """Take the key from that of the namespace."""
        self._key = hmac.digest(key, _DOMAIN, sha256)

    def seal(self, picked: Picked) -> bytes:
        """The header's value. The key must have been read."""
        decision = picked.decision
        short = msgspec.structs.replace(
            decision, candidates=(decision.chosen,), constraints=NO_CONSTRAINTS, assumed=b"", excluded=b""
        )
        text = _encode(Picked(picked.id, picked.pool, short))
        return urlsafe_b64encode(self._code(text) + text)

    async def open(self, headers: Headers) -> Picked | None:
        """The decision in a request's headers. None without one, and for one that is not to be followed, whose reason is logged."""
        value = next((value for name, value in headers if name == DECISION_HEADER), b"")
        if not value:
            return None
        try:
            await self.load()
            picked = self._open(value)
        except LogError as error:
            _log.warning("pick_not_read", reason=str(error))
            return None
        except ValueError as error:
            _log.warning("pick_rejected", reason=str(error))
            return None
        if next((value for name, value in headers if name == ATTEMPT_COUNT), b"1") != b"1":
            return None
        if picked.id in self._followed:
            _log.warning("pick_rejected", attempt=picked.decision.request, reason="it was followed before")
            return None
        self._followed[picked.id] = None
        if len(self._followed) > DECISIONS_REMEMBERED_MAX:
            self._followed.popitem(last=False)
        return picked

    def _open(self, value: bytes) -> Picked:
        """Raises `ValueError`."""
        raw = urlsafe_b64decode(value)
        code, text = raw[:CODE_BYTES], raw[CODE_BYTES:]
        if not hmac.compare_digest(code, self._code(text)):
            raise ValueError("it is not from a picker of this namespace")
        picked = _decode(text)
        age_s = (self._clock.wall_ns() - picked.decision.wall_ns) / 1e9
        if abs(age_s) > DECISION_AGE_S_MAX:
            raise ValueError(f"it is {age_s:.0f} s old by this machine's clock")
        return picked

    def _code(self, text: bytes) -> bytes:
        return hmac.digest(self._key, text, sha256)[:CODE_BYTES]


# The parts of an edge that its endpoints share, and one call to them.

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
    body was here by the monotonic clock, the decision that it came with, and its query string.
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
    query: bytes = b""

    @property
    def asked(self) -> dict[str, str]:
        """The parameters in its query string."""
        return dict(parse_qsl(self.query.decode("latin-1")))

    def context(self, model: Model) -> int:
        """The tokens that prompt and answer may have together, for its sender."""
        return self.quota.context(model.card.name, model.card.context_length)

    async def answer(self, document: Any, headers: Headers | None = None) -> None:
        """Send a whole JSON response."""
        await respond(self.send, 200, msgspec.json.encode(document), headers or [])

    def make_id(self, ids: Callable[[], str]) -> str:
        """The id of its request: the one that it was decided under, or a new one."""
        return self.picked.id if self.picked is not None else ids()


def request_headers(name: str) -> Headers:
    """The header with the name of a request."""
    return [(b"x-request-id", name.encode())]


Endpoint = Callable[..., Awaitable[None]]
"""Answers a call, given the ids in its path."""


class Routes:
    """Endpoints by their paths and methods. A path may have groups of a regular expression: ids."""

    def __init__(self, routes: Mapping[str, Mapping[str, Endpoint]]) -> None:
        self.plain = {path: methods for path, methods in routes.items() if "(" not in path}
        self._patterns = [(re.compile(path), methods) for path, methods in routes.items() if "(" in path]

    def find(self, method: str, path: str) -> Endpoint | None:
        """What answers a call of this path; None if there is no such path. Raises `ApiError` 405."""
        if (methods := self.plain.get(path)) is not None:
            return _of_method(method, methods)
        for pattern, methods in self._patterns:
            if (match := pattern.fullmatch(path)) is not None:
                endpoint, ids = _of_method(method, methods), match.groups()
                return lambda call: endpoint(call, *ids)
        return None


def _of_method(method: str, methods: Mapping[str, Endpoint]) -> Endpoint:
    if method not in methods:
        raise method_not_allowed(*methods)
    return methods[method]


def internal_error(path: str, error: Exception) -> ApiError:
    """500 for an error that no request should cause; the log says where it was."""
    _edge_log.error("request_failed", path=path, failure=failure_place(error))
    _edge_log.debug("request_failure", exc_info=True)
    return ApiError(500, "Internal error; see the log of the edge.", kind="server_error")


class Serving(NamedTuple):
    """The parts of one edge. `salts` keep the cached prompts of tenants apart. `intake` fetches and decodes media, None: there is text only."""

    workers: WorkerRegistry
    models: ModelCatalog
    ledger: OpenRequests
    fields: FieldChecker
    settings: EdgeSettings = EdgeSettings()
    salts: CacheSalts = NO_SALTS
    intake: MediaIntake | None = None

    def intake_of(self, call: Call) -> TenantIntake | None:
        """The media intake for the items of a client's call. Raises `ApiError` 400 for a header that names no tenant."""
        if self.intake is None:
            return None
        return TenantIntake(self.intake, tenant_of(call.headers, call.principal))

    def model(self, name: str, call: Call) -> Model:
        """The model that a request names. Raises `ApiError` 403 and 404."""
        return permitted_model(self.models, call.principal, name)

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
