"""Routing hints: what a client's headers and fields say about routing, checked, and on its way into the route query.

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

import math
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final, NamedTuple

import msgspec

from headwater.actors.edge.admit.principal import ANONYMOUS, Principal, forbidden
from headwater.actors.edge.settings import ClientLimits
from headwater.actors.http.asgi import Headers
from headwater.actors.http.errors import bad_request
from headwater.schemas.constraints import (
    NO_CONSTRAINTS,
    NO_FLOW_CONTROL,
    NO_PREFERENCES,
    Constraints,
    FlowControl,
    Preferences,
)
from headwater.schemas.events.route import RouteQuery
from headwater.schemas.names import InvalidName, token
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


def _override(hinted: Constraints, own: Constraints) -> Constraints:
    """`own`, with the hint for every constraint that it leaves open."""
    return Constraints(**{name: getattr(own, name) or getattr(hinted, name) for name in _CONSTRAINTS})


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
    given = _HeaderReader(headers)
    if principal.authenticated:
        _require_scopes(given, principal, priority)
    flow = FlowControl(priority=priority or 0, tenant=_tenant(given, principal))
    conversation = _digest("opening", f"{principal.tenant} {opening}".encode()) if opening else ""
    if given.is_silent and not user and not session:
        preferences = Preferences(conversation=conversation) if conversation else NO_PREFERENCES
        return RoutingHints(preferences=preferences, flow=flow)
    affinity = given.text("x-headwater-session") or given.text("x-session-id")
    if not affinity and session:
        affinity = _digest("cache", session.encode())
    if not affinity and user:
        affinity = _digest("user", user.encode())
    if affinity and principal.authenticated:
        affinity = _digest("session", f"{principal.tenant} {affinity}".encode())
    return RoutingHints(
        Constraints(
            pinned=_pinned(given, limits, "x-headwater-worker"),
            tier=given.name("x-headwater-tier"),
            tolerates=given.names("x-headwater-tolerates"),
            engine=_pinned(given, limits, "x-headwater-engine"),
            revision=_pinned(given, limits, "x-headwater-revision"),
        ),
        Preferences(
            policy=given.one_of("x-headwater-policy", limits.policies),
            temperature=given.number("x-headwater-router-temperature", limits.temperature_max),
            session=affinity,
            conversation=conversation,
        ),
        msgspec.structs.replace(flow, deadline_ms=given.count("x-headwater-deadline-ms", DEADLINE_MS_MAX)),
    )


def tenant_of(headers: Headers, principal: Principal) -> str:
    """The tenant that a request counts for. Raises `ApiError` 400 that names the header."""
    return _tenant(_HeaderReader(headers), principal)


def _tenant(given: "_HeaderReader", principal: Principal) -> str:
    return principal.tenant or given.text("x-headwater-tenant") or _tenant_by_key(given)


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


def _require_scopes(given: "_HeaderReader", principal: Principal, priority: int | None) -> None:
    for header, permission in SCOPES:
        if given.has(header):
            principal.require(permission, header)
    if priority:
        principal.require("priority", "priority")
    if given.has("x-headwater-tenant") and given.text("x-headwater-tenant") != principal.tenant:
        raise forbidden(
            "x-headwater-tenant is not the tenant of this key. The tenant comes from the key; leave the header out.",
            param="x-headwater-tenant",
        )


def _pinned(given: "_HeaderReader", limits: ClientLimits, header: str) -> str:
    """The worker, engine or revision that a header names."""
    name = given.text(header) if header == "x-headwater-revision" else given.name(header)
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
        found = tuple(dict.fromkeys(_checked(one.strip(), name) for one in value.split(","))) if value else ()
        if len(found) > TOLERATES_MAX:
            raise bad_request(f"{name} takes at most {TOLERATES_MAX} names, got {len(found)}.", param=name)
        return found

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


def _tenant_by_key(given: _HeaderReader) -> str:
    scheme, _, key = given.raw("authorization").partition(b" ")
    return _digest("key", key.strip()) if scheme.lower() == b"bearer" and key.strip() else ""


def _digest(kind: str, secret: bytes) -> str:
    # Keys and user names must not reach a router or a log.
    return f"{kind}-{blake2b(secret, digest_size=8).hexdigest()}"
