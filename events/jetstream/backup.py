"""Backup and restore of streams by the server's own snapshots: every message with its position, time and headers.

A copy by a consumer would give each message a new position, and decisions, snapshots of routers and bookmarks name positions. The
server sends a stream's files as they are at one moment, in chunks that are acknowledged, and takes them back only under a name that no
stream has.
"""

import asyncio
import hashlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from headwater.events.jetstream.api import api, error_of
from headwater.events.ports import LogRefused, LogUnavailable

CHUNK_BYTES: Final = 128 * 1024
WINDOW_BYTES: Final = 4 * 1024 * 1024
SILENCE_S: Final = 30.0
"""A server that sends or takes nothing for this long has given up."""

QUEUE_MAX: Final = 2 * WINDOW_BYTES // CHUNK_BYTES


class StreamCopy(msgspec.Struct, frozen=True):
    """What is known of a stream that was copied: its configuration, its state, and the size and SHA-256 of its copy."""

    config: dict[str, Any]
    state: dict[str, Any]
    bytes: int
    digest: str


async def snapshot_stream(client: Client, name: str, write: Callable[[bytes], object]) -> StreamCopy:
    """Copy a stream as of now through `write`; the server checks its checksums before. Raises `LogError`."""
    received: asyncio.Queue[Msg] = asyncio.Queue(QUEUE_MAX)
    inbox = client.new_inbox()
    subscription = await client.subscribe(inbox, cb=received.put)
    digest, size = hashlib.sha256(), 0
    try:
        body = {
            "deliver_subject": inbox,
            "no_consumers": True,
            "chunk_size": CHUNK_BYTES,
            "window_size": WINDOW_BYTES,
            "jsck": True,
        }
        answer = await api(client, f"STREAM.SNAPSHOT.{name}", body, SILENCE_S)
        while True:
            try:
                async with asyncio.timeout(SILENCE_S):
                    message = await received.get()
            except TimeoutError as error:
                raise LogUnavailable(
                    f"stream {name}: the server sent nothing more of its snapshot for {SILENCE_S:g} s"
                ) from error
            if not message.data:
                _check_end(name, message)
                return StreamCopy(answer["config"], answer["state"], size, digest.hexdigest())
            await asyncio.to_thread(write, message.data)
            digest.update(message.data)
            size += len(message.data)
            if message.reply:
                await client.publish(message.reply, b"")
    finally:
        await subscription.unsubscribe()


def _check_end(name: str, message: Msg) -> None:
    """The last message is empty, and says in a header why there is no more. Raises `LogUnavailable` unless that is the end."""
    status = (message.headers or {}).get("Status", "")
    if status and not status.startswith("2"):
        reason = (message.headers or {}).get("Description", status)
        raise LogUnavailable(f"stream {name}: the server ended its snapshot: {reason}")


async def restore_stream(
    client: Client, config: dict[str, Any], state: dict[str, Any], chunks: Iterator[bytes]
) -> None:
    """Make a stream of this configuration and state from the chunks of its copy. Raises `LogError`, also where there is one of its name."""
    name = config["name"]
    answer = await api(client, f"STREAM.RESTORE.{name}", {"config": config, "state": state}, SILENCE_S)
    subject = answer["deliver_subject"]
    while chunk := await asyncio.to_thread(next, chunks, b""):
        await _send(client, subject, chunk)
    created = await _send(client, subject, b"")
    if not created:
        raise LogRefused(f"stream {name}: the server did not say that it was restored")


async def _send(client: Client, subject: str, chunk: bytes) -> dict[str, Any]:
    """Send one chunk and wait until the server has it. Raises `LogError`."""
    try:
        reply = await client.request(subject, chunk, timeout=SILENCE_S)
    except (NatsError, TimeoutError) as error:
        raise LogUnavailable(f"{subject}: the server took no more of the stream: {error!r}") from error
    document: dict[str, Any] = {}
    if reply.data.startswith(b"{"):
        document = msgspec.json.decode(reply.data)
    if document.get("error"):
        raise error_of(subject, document["error"])
    return document
