"""Names as text: tokens of subjects and pools, hosts with ports, requests, and the traces and spans of requests.

Host and port are joined here and at no other place.

A request's name is 24 hex digits, the first 8 of which are the Unix time in seconds at which the name was made. So a request is
found in a log by its name alone, without reading the whole log.

Ids of traces and spans are functions of names. So whoever describes a request, whenever, from whichever copy of the log, gives its
spans the same ids, and a worker knows the span of its leg, which is the parent of its engine's spans, before anybody has made it.
"""

import re
import secrets
from collections.abc import Callable
from hashlib import blake2b
from ipaddress import ip_address
from itertools import count
from typing import Final

import msgspec

_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
_DIGEST_END = re.compile(r"-[0-9a-f]{8}\Z")
POOL_NAME_MAX = 56
"""Characters of a pool's name without its block size."""

REVISION_MAX = 96
"""Characters of the name of a worker's revision."""

_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")


PROBE = "__probe"
"""Writer of the empty messages that probe whether a log accepts any. No actor has a name that starts like this."""


class InvalidName(ValueError):
    """A name that cannot be a subject token."""


def token(kind: str, name: str) -> str:
    """Return `name` if it may be one subject token, else raise `InvalidName` naming `kind`.

    Subject tokens are 1 to 64 of letters, digits, '-' and '_': dots, wildcards and spaces would change
    which subjects a subscription matches.
    """
    if not _TOKEN.match(name):
        raise InvalidName(f"{kind} {name!r} is not a valid name: use 1 to 64 letters, digits, '-' or '_'")
    return name


def slug(text: str) -> str:
    """Turn any text (a model path, a host name) into a valid token, lower case."""
    return (_UNSAFE.sub("-", text).strip("-").lower() or "unnamed")[:64]


def pool_name(model: str, block_size: int) -> str:
    """The pool of workers whose KV blocks are interchangeable: one base model, one block size.

    A name that is a short lower-case token stays as it is; any other one gets a digest of the whole name, so that no two share a pool.
    """
    plain = slug(model)
    if plain != model or len(plain) > POOL_NAME_MAX or _DIGEST_END.search(plain):
        digest = blake2b(model.encode(errors="surrogatepass"), digest_size=4).hexdigest()
        plain = f"{plain[: POOL_NAME_MAX - 9].rstrip('-')}-{digest}"
    return f"{plain}-b{block_size}"


# Hosts with ports.

NATS_PORT: Final = 4222
"""The port that NATS servers listen on by convention."""

LOOPBACK: Final = "127.0.0.1"
WILDCARDS: Final = ("0.0.0.0", "::", "[::]")
"""All addresses of a machine, and none that another one could connect to."""


def host_port(host: str, port: int) -> str:
    """`host:port` as it stands in a URL: an address of IPv6 in brackets."""
    bare = _bare(host)
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def split_host_port(text: str) -> tuple[str, int]:
    """The opposite of `host_port`. Raises `ValueError`."""
    host, _, port = text.rpartition(":")
    return _bare(host), int(port)


def reachable(host: str) -> str:
    """An address of this machine at which a server that listens on `host` answers."""
    bare = _bare(host)
    return {"": LOOPBACK, "0.0.0.0": LOOPBACK, "::": "::1"}.get(bare, bare)


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches servers that listen on this address. Names are not looked up."""
    try:
        return ip_address(_bare(host)).is_loopback
    except ValueError:
        return host == "localhost"


def _bare(host: str) -> str:
    return host.removeprefix("[").removesuffix("]")


# Names of requests.

SECOND_NS: Final = 1_000_000_000

ID_S_MIN: Final = 1_704_067_200
"""2024-01-01: no name was made before."""

AHEAD_S_MAX: Final = 86_400
"""How far the clock of the machine that made a name may be ahead of the reader's."""

_ID: Final = re.compile(r"(?<![0-9a-zA-Z])([0-9a-f]{8})[0-9a-f]{16}(?![0-9a-zA-Z])")

_ATTEMPT: Final = re.compile(r"-\d{1,9}-\d{1,9}(?:-e\d+-\d+)?$")


def unique_ids(wall_ns: Callable[[], int]) -> Callable[[], str]:
    """Ids of 24 hex digits: the time in seconds (`wall_ns` returns nanoseconds since the Unix epoch), 8 digits that are random per process, and a counter.

    Random digits are drawn once: asking the system for each id costs 4 % of an edge. The time is formatted once per second. The
    counter, which begins at random too, never repeats within a second, also when the clock goes back.
    """
    process, number = secrets.token_hex(4), count(secrets.randbelow(1 << 31)).__next__
    began_ns = ends_ns = 0
    prefix = ""

    def make() -> str:
        nonlocal began_ns, ends_ns, prefix
        now_ns = wall_ns()
        if not began_ns <= now_ns < ends_ns:
            began_ns = now_ns - now_ns % SECOND_NS
            ends_ns = began_ns + SECOND_NS
            prefix = f"{began_ns // SECOND_NS & 0xFFFFFFFF:08x}{process}"
        return f"{prefix}{number() & 0xFFFFFFFF:08x}"

    return make


def time_of(name: str, now_ns: int) -> int | None:
    """When the id in a request's name was made, in nanoseconds since the Unix epoch, to the second.

    None for a name without an id of this form, and where the time cannot be one: it is before 2024 or after `now_ns`.
    """
    match = _ID.search(name)
    if match is None:
        return None
    seconds = int(match[1], 16)
    if not ID_S_MIN <= seconds <= now_ns // SECOND_NS + AHEAD_S_MAX:
        return None
    return seconds * SECOND_NS


def request_of(attempt: str) -> str:
    """The name of the request in that of an attempt, `REQUEST-CHOICE-NUMBER`, or of its encode leg, `…-eITEM-NUMBER`."""
    return _ATTEMPT.sub("", attempt)


# Traces and spans.

TRACE_BYTES: Final = 16
SPAN_BYTES: Final = 8

RATIO_BITS: Final = 64
"""Of a trace id, its last bits decide whether a share of all traces has it, as in OpenTelemetry's `TraceIdRatioBased`."""


class TraceContext(msgspec.Struct, frozen=True, array_like=True):
    """The headers `traceparent` and `tracestate` of a client: its trace id, the id of its span (both in hexadecimal), whether it records the
    trace, and its `tracestate`. Without such headers it is empty.
    """

    trace: str = ""
    span: str = ""
    sampled: bool = False
    state: str = ""

    def trace_of(self, request: str) -> str:
        """Return the trace id of a request: the client's, or else one that the request's name gives."""
        return self.trace or blake2b(request.encode(), digest_size=TRACE_BYTES).hexdigest()

    def trace_of_attempt(self, attempt: str) -> Callable[[], str]:
        """Return what makes the trace id of an attempt's request, once a log line is written."""
        return lambda: self.trace_of(request_of(attempt))

    def is_sampled(self, request: str, ratio: float) -> bool:
        """Return whether the trace is recorded from its beginning: as the client decided, or else for this share of all trace ids."""
        if self.trace:
            return self.sampled
        low = int(self.trace_of(request), 16) & ((1 << RATIO_BITS) - 1)
        return low < round(ratio * (1 << RATIO_BITS))

    def headers_below(self, request: str, leg: str, ratio: float) -> dict[str, str]:
        """Return the headers that make the spans of an engine children of a leg's span."""
        trace = self.trace_of(request)
        flags = "01" if self.is_sampled(request, ratio) else "00"
        headers = {"traceparent": f"00-{trace}-{span_id(trace, request, leg)}-{flags}"}
        return headers | {"tracestate": self.state} if self.state else headers


NO_TRACE: Final = TraceContext()


def span_id(trace: str, request: str, *place: object) -> str:
    """Return the id of a span of a request, by its place in it: for the leg of an attempt the attempt's name, for the whole request nothing."""
    name = "\n".join((trace, request, *map(str, place)))
    return blake2b(name.encode(), digest_size=SPAN_BYTES).hexdigest()
