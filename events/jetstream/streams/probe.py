"""Does a stream accept appends? Tested by appending: the stream's information does not show a frozen store.

After a write error a store replies to no publish until its server is restarted (nats-server 2.14 and newer). The probe
has no effect: in a log it is an empty batch of a reserved writer, in a bucket the purge of a reserved key.
"""

from typing import Final

from nats.aio.client import Client

from headwater.events.errors import AccessDenied, LogError
from headwater.events.jetstream.api import publish
from headwater.events.jetstream.log import JetStreamLog
from headwater.events.jetstream.streams.spec import StreamSpec
from headwater.events.log import Entry, Stored
from headwater.schemas import subjects
from headwater.schemas.clock import Clock
from headwater.schemas.encoding.codec import seal
from headwater.schemas.encoding.envelope import SCHEMA_VERSION, Batch
from headwater.schemas.names import PROBE

ANSWER_S: Final = 3.0

FROZEN: Final = (
    "not persisting: an append was not acknowledged within 3 s. Free space on the server's disk; if it was full or read-only, "
    "restart that nats-server (`headwater up` restarts its own)"
)


async def probe(client: Client, ns: str, spec: StreamSpec, clock: Clock) -> str:
    """Append to the stream; returns the problem, empty where it was stored or where this client may not append."""
    try:
        if spec.what in ("pool log", "request log"):
            subject = (
                subjects.pool_subject(ns, spec.pool, "load", PROBE)
                if spec.pool
                else subjects.request_subject(ns, PROBE)
            )
            return await _append(JetStreamLog(client, spec.name), subject, clock)
        bucket = spec.name.partition("_")[2]
        subject = (
            subjects.object_chunks(bucket, PROBE)
            if spec.name == subjects.object_stream(bucket)
            else subjects.table_subject(bucket, PROBE)
        )
        await publish(client, subject, b"", {"KV-Operation": "PURGE", "Nats-Rollup": "sub"}, ANSWER_S)
    except AccessDenied:
        return ""
    except LogError as error:
        return f"{FROZEN} ({error})"
    return ""


async def _append(log: JetStreamLog, subject: str, clock: Clock) -> str:
    newest = await log.newest(subject)
    batch: Batch[None] = Batch(
        version=SCHEMA_VERSION,
        writer=PROBE,
        epoch=newest.epoch + 1,
        seq=1,
        wall_ns=clock.wall_ns(),
        events=(),
        previous=newest.digest,
    )
    result = await log.append(Entry(subject, seal(batch)), deadline_s=ANSWER_S)
    return "" if isinstance(result, Stored) else FROZEN
