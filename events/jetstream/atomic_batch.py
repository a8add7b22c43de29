"""Atomic batches (ADR-50, nats-server 2.12): several messages stored together or not at all."""

from collections.abc import Sequence
from typing import NamedTuple
from uuid import uuid4

from nats.aio.client import Client
from nats.errors import Error as NatsError

from headwater.events.errors import LogRefused, LogUnavailable
from headwater.events.jetstream.api import Ack, check_sizes, publish, request_json
from headwater.events.jetstream.connection import watched
from headwater.events.jetstream.error_codes import ALREADY_THERE


class Part(NamedTuple):
    """One message of a batch."""

    subject: str
    data: bytes
    headers: dict[str, str]


async def publish_together(client: Client, parts: Sequence[Part], deadline_s: float) -> Ack:
    """Store all parts in this order at consecutive sequences; returns the last one's.

    Each part's expected sequence is compared with the stream before the batch. Raises as `api.request_json`.
    """
    if len(parts) == 1:
        [only] = parts
        return await publish(client, only.subject, only.data, only.headers, deadline_s)
    # A denied part gets no reply; the batch then fails for a missing part, which is less specific.
    async with watched(client, *{part.subject for part in parts[:-1]}):
        return await _publish_batch(client, parts, deadline_s)


async def _publish_batch(client: Client, parts: Sequence[Part], deadline_s: float) -> Ack:
    for part in parts:
        check_sizes(client, part.subject, [part.data])
    batch = uuid4().hex
    try:
        for number, part in enumerate(parts[:-1], start=1):
            headers = {"Nats-Batch-Id": batch, "Nats-Batch-Sequence": str(number), **part.headers}
            await client.publish(part.subject, part.data, headers=headers)
    except NatsError as error:
        # The server discards what was sent: the batch was not committed.
        raise LogUnavailable(f"{parts[0].subject}: {error!r}") from error
    last = parts[-1]
    headers = {
        "Nats-Batch-Id": batch,
        "Nats-Batch-Sequence": str(len(parts)),
        "Nats-Batch-Commit": "1",
        **last.headers,
    }
    try:
        answer = await request_json(client, last.subject, last.data, headers, deadline_s)
    except LogRefused as error:
        if error.code == ALREADY_THERE:
            return Ack(0, True)
        raise
    return Ack(int(answer["seq"]), False)
