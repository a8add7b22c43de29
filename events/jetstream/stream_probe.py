"""Does a stream take appends? Asked by appending: its information shows nothing of a store that is frozen.

A store that met a write error answers no publish at all until its server is restarted (nats-server 2.14 and newer). What
is appended says nothing: an empty batch of a writer that no actor can be in a log, a purge of a key in a bucket.
"""

from typing import Final

from nats.aio.client import Client

from headwater.events.errors import AccessDenied, LogError
from headwater.events.jetstream.api import publish
from headwater.events.jetstream.log import JetStreamLog
from headwater.events.jetstream.stream_spec import StreamSpec
from headwater.events.log import Entry, Stored
from headwater.schemas import subjects
from headwater.schemas.clock import Clock
from headwater.schemas.envelope import SCHEMA_VERSION, Batch
from headwater.schemas.names import PROBE
from headwater.schemas.pool import seal

ANSWER_S: Final = 3.0

FROZEN: Final = (
    "not persisting: an append was not taken within 3 s. Make room on the server's disk; if it was full or read-only, "
    "restart that nats-server (`headwater up` restarts its own)"
)


async def probe(client: Client, ns: str, spec: StreamSpec, clock: Clock) -> str:
    """Append to the stream; returns what is wrong, empty where it was stored or where this client may not append."""
    try:
        if spec.what in ("pool log", "request log"):
            subject = (
                subjects.pool_subject(ns, spec.pool, "load", PROBE)
                if spec.pool
                else subjects.request_subject(ns, PROBE)
            )
            return await _append(JetStreamLog(client, spec.name), subject, clock)
        bucket = spec.name.partition("_")[2]
        subject = f"$O.{bucket}.C.{PROBE}" if spec.name.startswith("OBJ_") else f"$KV.{bucket}.{PROBE}"
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
