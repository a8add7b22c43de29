"""Requests to the JetStream API: JSON in, JSON out, errors typed, every call with a deadline.

Error codes are from the server's list (`server/errors.json`, codes 10002 to 10227 at nats-server 2.15). The HTTP-like `code` is right for
most: 400, 404 and 412 are permanent, everything else is retryable. The sets below are the exceptions. An unknown code, of
a newer server, is retryable: treating a temporary error as permanent would stop the process.
"""

import base64
from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple

import msgspec
from nats.aio.client import Client
from nats.errors import ConnectionClosedError, MaxPayloadError, NoRespondersError
from nats.errors import Error as NatsError

from headwater.events.jetstream.connection import watched
from headwater.events.ports import LogError, LogFull, LogRefused, LogUnavailable, StreamMissing

STREAM_NOT_FOUND: Final = 10059
MESSAGE_NOT_FOUND: Final = 10037
WRONG_LAST_SEQUENCE: Final = 10071
SUBJECT_BUSY: Final = 10164
STREAM_NAME_IN_USE: Final = 10058
INVALID_JSON: Final = 10025
EXPECTED: Final = "Nats-Expected-Last-Subject-Sequence"
"""Header of a publish that is accepted only if the newest message of its subject has this sequence."""

ALREADY_THERE: Final = 10201
"""A message id of an atomic batch is a duplicate: an earlier attempt was stored."""

NEWEST_KNOWN: Final = 10227

FULL: Final = frozenset(
    {
        10002,  # account limits
        10023,  # insufficient resources
        10028,  # memory limit
        10047,  # storage limit
        10053,  # stream limits
        10077,  # the store failed: no space, an I/O error, or a store frozen by one
    }
)
"""The store is full. Retryable once an operator freed space."""

PASSES: Final = frozenset(
    {
        10005,  # no peers: servers are offline
        10013, 10014, 10026, 10105, 10148, 10149, 10225,  # a consumer of an earlier attempt, or one that was removed
        10040, 10044, 10124, 10129, 10202, 10226,  # membership or a move under way
        10043,  # a sequence that does not exist yet
        10176, 10208,  # a batch whose first part was lost with its leader
    }
)  # fmt: skip
"""Status 4xx, but the same call may succeed later. Conflicts (`WRONG_LAST_SEQUENCE`, `SUBJECT_BUSY`) are not
included: they are results that the caller of a conditional write handles."""

STAYS: Final = frozenset({10006, 10010, 10036, 10052, 10069, 10074, 10117})
"""Status 5xx, but the same call fails again: invalid configurations."""

Meaning = Literal["missing", "full", "retryable", "final"]


def meaning_of(err_code: int, code: int) -> Meaning:
    """Return how to handle an error reply with these two codes."""
    if err_code == STREAM_NOT_FOUND:
        return "missing"
    if err_code in FULL:
        return "full"
    if err_code in STAYS:
        return "final"
    if err_code in PASSES or not 0 < err_code <= NEWEST_KNOWN:
        return "retryable"
    return "final" if code in (400, 404, 412) else "retryable"


# Requests.

REQUEST_DEADLINE_S = 5.0
SECOND_NS = 1_000_000_000
"""Durations in the API are in nanoseconds."""


class Ack(NamedTuple):
    """A stored message's sequence, and whether it is a duplicate of a stored one."""

    seq: int
    duplicate: bool


class LastMessage(NamedTuple):
    """The newest message of a subject."""

    seq: int
    data: bytes
    headers: str


async def api(
    client: Client,
    verb: str,
    body: dict[str, Any] | None = None,
    deadline_s: float = REQUEST_DEADLINE_S,
    *,
    domain: str = "",
) -> dict[str, Any]:
    """Call `$JS.API.<verb>`, of this or of another JetStream domain, which leaf nodes connect.

    Raises `StreamMissing`, `LogRefused` or `LogUnavailable`.
    """
    data = msgspec.json.encode(body) if body else b""
    prefix = f"$JS.{domain}.API" if domain else "$JS.API"
    return await request_json(client, f"{prefix}.{verb}", data, None, deadline_s)


async def stream_info(client: Client, stream: str) -> dict[str, Any]:
    """A stream's configuration and state. Raises as `api` does."""
    return await api(client, f"STREAM.INFO.{stream}")


async def request_json(
    client: Client, subject: str, data: bytes, headers: dict[str, str] | None, deadline_s: float
) -> dict[str, Any]:
    """One request with a JSON answer. Raises as `api` does; `AccessDenied` is a `LogRefused`."""
    try:
        async with watched(client, subject):
            reply = await client.request(subject, data, timeout=deadline_s, headers=headers)
    except NoRespondersError as error:
        raise LogUnavailable(f"no responders on {subject}: no stream, no leader or no JetStream") from error
    except TimeoutError as error:
        raise LogUnavailable(f"no answer on {subject} within {deadline_s} s") from error
    except ConnectionClosedError as error:
        raise LogUnavailable("the NATS connection is closed") from error
    except MaxPayloadError as error:
        raise too_large(subject, len(data), client) from error
    except NatsError as error:
        raise LogUnavailable(f"{subject}: {error}") from error
    answer: dict[str, Any] = msgspec.json.decode(reply.data)
    failure = answer.get("error")
    if failure:
        raise error_of(subject, failure)
    return answer


def too_large(subject: str, size: int, client: Client) -> LogRefused:
    """The error for a message that the server will never take."""
    return LogRefused(f"{subject}: {size} bytes exceed the NATS server's max_payload of {client.max_payload}")


HEADERS_BYTES: Final = 1024
"""Headers of a message of ours have at most this many bytes; they count."""


def check_sizes(client: Client, subject: str, messages: Iterable[bytes]) -> None:
    """Check that the server can take all messages of a batch, before the first is sent. Raises `LogRefused`."""
    largest = max(map(len, messages), default=0)
    if largest + HEADERS_BYTES > client.max_payload:
        raise too_large(subject, largest, client)


def error_of(subject: str, failure: dict[str, Any]) -> LogError:
    """The exception for the server's error object."""
    code = int(failure.get("err_code", 0))
    text = f"{subject}: {failure.get('description', 'refused')} (NATS error {code})"
    match meaning_of(code, int(failure.get("code", 0))):
        case "missing":
            return StreamMissing(text)
        case "full":
            return LogFull(f"{text}: raise the stream's limit or free space on the server's disk")
        case "retryable":
            return LogUnavailable(text)
        case "final":
            return LogRefused(text, code)


async def publish(
    client: Client, subject: str, data: bytes, headers: dict[str, str], deadline_s: float
) -> Ack:
    """Store one message and return the server's acknowledgement."""
    answer = await request_json(client, subject, data, headers, deadline_s)
    return Ack(int(answer["seq"]), bool(answer.get("duplicate", False)))


async def last_message(
    client: Client, stream: str, subject: str, deadline_s: float = REQUEST_DEADLINE_S
) -> LastMessage | None:
    """The newest message of `subject`, read from the leader, so that it includes every acknowledged write."""
    message = await _find_message(client, stream, {"last_by_subj": subject}, deadline_s)
    if message is None:
        return None
    return LastMessage(
        int(message["seq"]),
        base64.b64decode(message.get("data", "")),
        base64.b64decode(message.get("hdrs", "")).decode("utf-8", "replace"),
    )


class NextMessage(NamedTuple):
    """The first message from some position on, which deleted positions do not hide, and when it was stored."""

    seq: int
    stored_ns: int


async def next_message(client: Client, stream: str, seq: int, subject: str = ">") -> NextMessage | None:
    """The first message of `subject` at this position or after it, from the leader; None if there is none."""
    wanted = {"seq": seq, "next_by_subj": subject}
    message = await _find_message(client, stream, wanted, REQUEST_DEADLINE_S)
    return NextMessage(int(message["seq"]), parse_time_ns(message["time"])) if message is not None else None


async def _find_message(
    client: Client, stream: str, wanted: dict[str, Any], deadline_s: float
) -> dict[str, Any] | None:
    try:
        message: dict[str, Any] = (await api(client, f"STREAM.MSG.GET.{stream}", wanted, deadline_s))[
            "message"
        ]
    except LogRefused as error:
        if error.code == MESSAGE_NOT_FOUND:
            return None
        raise
    return message


def parse_time_ns(text: str) -> int:
    """The server's time (RFC 3339) as nanoseconds since 1970, to the microsecond; 0 for its "never"."""
    if not text or text.startswith("0001-"):
        return 0
    moment = datetime.fromisoformat(text)
    return int(moment.timestamp()) * SECOND_NS + moment.microsecond * 1_000
