"""What a client wishes of the router: headers and fields of its request, checked, on their way into a query.

    x-headwater-session, x-session-id    requests of one session go to one worker, under a policy that looks at it;
                                         without either OpenAI's `user` field is taken, as a digest
    x-headwater-policy                   another policy than the router's own, of those that clients may name
    x-headwater-router-temperature       how far from the best worker the choice may be, up to a bound
    x-headwater-worker                   this worker and no other (policy direct), where clients may choose one
    x-headwater-tier                     only workers of this tier
    x-headwater-tolerates                taints that its worker may have, with commas
    x-headwater-tenant                   on whose account it waits; without it a digest of the API key
    x-headwater-deadline-ms              within which the first token must come, else the request is refused
    priority (a field of the body)       lower is served first; the engine gets it too, where it knows priorities

The edge checks no API keys: who must not choose a tenant, a tier or a policy needs a gateway that sets these headers.
"""

import math
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final, NamedTuple

import msgspec

from headwater.actors.edge.errors import bad_request
from headwater.actors.edge.http import Headers
from headwater.schemas.names import InvalidName, token
from headwater.schemas.route import CLIENT_POLICIES, RouteQuery

DIRECT: Final = "direct"
TEXT_MAX: Final = 256
TOLERATES_MAX: Final = 16
DEADLINE_MS_MAX: Final = 86_400_000


class ClientLimits(NamedTuple):
    """What clients may wish for: these policies, and a temperature from 0 to this."""

    policies: tuple[str, ...] = CLIENT_POLICIES
    temperature_max: float = 1.0


class Wishes(NamedTuple):
    """See `RouteQuery`. `deadline_ms` is counted from when the request came."""

    session: str = ""
    policy: str = ""
    temperature: float = -1.0
    tier: str = ""
    tolerates: tuple[str, ...] = ()
    priority: int = 0
    tenant: str = ""
    deadline_ms: int = 0
    worker: str = ""

    def put_into(self, query: RouteQuery, *, passed_s: float, waits: bool) -> RouteQuery:
        """The query with these wishes, `passed_s` after the request came.

        One that may not wait (`waits`) was given to a worker before: its deadline is no matter any more.
        """
        left_ms = max(1, self.deadline_ms - round(passed_s * 1_000.0)) if self.deadline_ms and waits else 0
        worker = "" if query.asked == "decode" else self.worker
        return msgspec.structs.replace(
            query,
            pinned=query.pinned or worker,
            session=self.session,
            policy=DIRECT if worker else self.policy,
            temperature=self.temperature,
            tier=self.tier,
            tolerates=self.tolerates,
            priority=self.priority,
            tenant=self.tenant,
            deadline_ms=left_ms,
            waits=waits,
        )


NO_WISHES: Final = Wishes()


def wishes_of(
    headers: Headers, limits: ClientLimits, *, user: str | None = None, priority: int | None = None
) -> Wishes:
    """What a request's headers and fields ask for. Raises `ApiError` 400 that names the header."""
    given = _Given(headers)
    session = given.text("x-headwater-session") or given.text("x-session-id")
    return Wishes(
        session or (_digest("user", user.encode()) if user else ""),
        given.one_of("x-headwater-policy", limits.policies),
        given.number("x-headwater-router-temperature", limits.temperature_max),
        given.name("x-headwater-tier"),
        given.names("x-headwater-tolerates"),
        priority or 0,
        given.text("x-headwater-tenant") or _tenant_by_key(given),
        given.count("x-headwater-deadline-ms", DEADLINE_MS_MAX),
        _worker(given, limits),
    )


def _worker(given: "_Given", limits: ClientLimits) -> str:
    worker = given.name("x-headwater-worker")
    if worker and DIRECT not in limits.policies:
        raise bad_request(
            f"x-headwater-worker: clients of this edge choose no worker (--client-policies has no {DIRECT}).",
            param="x-headwater-worker",
        )
    return worker


class _Given:
    """A request's headers by name; what is missing is empty."""

    def __init__(self, headers: Headers) -> None:
        self._raw: dict[bytes, bytes] = {}
        for name, value in headers:
            self._raw.setdefault(name, value)

    def raw(self, name: str) -> bytes:
        return self._raw.get(name.encode(), b"")

    def text(self, name: str) -> str:
        raw = self._raw.get(name.encode())
        if raw is None:
            return ""
        value = raw.decode("latin-1").strip()
        if not value or len(value) > TEXT_MAX or not (value.isascii() and value.isprintable()):
            raise bad_request(f"{name} has 1 to {TEXT_MAX} printable ASCII characters.", param=name)
        return value

    def name(self, name: str) -> str:
        value = self.text(name)
        return _checked(value, name) if value else ""

    def names(self, name: str) -> tuple[str, ...]:
        value = self.text(name)
        found = tuple(dict.fromkeys(_checked(one.strip(), name) for one in value.split(","))) if value else ()
        if len(found) > TOLERATES_MAX:
            raise bad_request(f"{name} has at most {TOLERATES_MAX} names, got {len(found)}.", param=name)
        return found

    def one_of(self, name: str, allowed: Sequence[str]) -> str:
        value = self.text(name)
        if value and value not in allowed:
            which = ", ".join(allowed) or "none: this edge lets clients choose no policy"
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


def _tenant_by_key(given: _Given) -> str:
    scheme, _, key = given.raw("authorization").partition(b" ")
    return _digest("key", key.strip()) if scheme.lower() == b"bearer" and key.strip() else ""


def _digest(kind: str, secret: bytes) -> str:
    # Neither keys nor users belong into a router or a log.
    return f"{kind}-{blake2b(secret, digest_size=8).hexdigest()}"
