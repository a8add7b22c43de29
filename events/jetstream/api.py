"""Requests to the JetStream API: JSON in, JSON out, errors typed, every call with a deadline."""

import base64
from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final, NamedTuple

import msgspec
from nats.aio.client import Client
from nats.errors import ConnectionClosedError, MaxPayloadError, NoRespondersError
from nats.errors import Error as NatsError

from headwater.events.errors import LogError, LogFull, LogRefused, LogUnavailable, StreamMissing
from headwater.events.jetstream.connection import watched
from headwater.events.jetstream.error_codes import MESSAGE_NOT_FOUND, meaning_of

REQUEST_DEADLINE_S = 5.0
SECOND_NS = 1_000_000_000
"""Durations in the API are in nanoseconds."""


class Ack(NamedTuple):
    """A stored message's sequence, and whether it is a duplicate of a stored one."""

    seq: int
    duplicate: bool


class StoredMessage(NamedTuple):
    """A message read back from a stream."""

    seq: int
    data: bytes
    headers: str


async def api(
    client: Client,
    verb: str,
    body: dict[str, Any] | None = None,
    deadline_s: float = REQUEST_DEADLINE_S,
) -> dict[str, Any]:
    """Call `$JS.API.<verb>`. Raises `StreamMissing`, `LogRefused` or `LogUnavailable`."""
    data = msgspec.json.encode(body) if body else b""
    return await request_json(client, f"$JS.API.{verb}", data, None, deadline_s)


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
"""Headers of a message of ours have at most so many bytes; they count."""


def check_sizes(client: Client, subject: str, messages: Iterable[bytes]) -> None:
    """Before the first message of a batch is sent: can the server take all of them? Raises `LogRefused`."""
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
) -> StoredMessage | None:
    """The newest message of `subject`, read from the leader, so that it includes every acknowledged write."""
    try:
        answer = await api(client, f"STREAM.MSG.GET.{stream}", {"last_by_subj": subject}, deadline_s)
    except LogRefused as error:
        if error.code == MESSAGE_NOT_FOUND:
            return None
        raise
    message = answer["message"]
    return StoredMessage(
        int(message["seq"]),
        base64.b64decode(message.get("data", "")),
        base64.b64decode(message.get("hdrs", "")).decode("utf-8", "replace"),
    )


def parse_time_ns(text: str) -> int:
    """The server's time (RFC 3339) as nanoseconds since 1970, to the microsecond; 0 for its "never"."""
    if not text or text.startswith("0001-"):
        return 0
    moment = datetime.fromisoformat(text)
    return int(moment.timestamp()) * SECOND_NS + moment.microsecond * 1_000
