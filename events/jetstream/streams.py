"""Stream definitions as data, and making the server have them."""

import asyncio
from typing import Any

from nats.aio.client import Client

from headwater.events.errors import AccessDenied, StreamMissing
from headwater.events.jetstream.api import api
from headwater.schemas import subjects

SECOND_NS = 1_000_000_000

POOL_MAX_AGE_S = 24 * 3600
POOL_MAX_BYTES = 8 * 1024**3
REQUEST_MAX_AGE_S = 72 * 3600
REQUEST_MAX_BYTES = 2 * 1024**3
DUPLICATE_WINDOW_S = 30
POLL_S = 0.1


def log_stream(name: str, subject: str, *, max_age_s: int, max_bytes: int, replicas: int) -> dict[str, Any]:
    """A stream that keeps events until they are too old or too many."""
    return {
        "name": name,
        "subjects": [subject],
        "retention": "limits",
        "storage": "file",
        "discard": "old",
        "num_replicas": replicas,
        "max_age": max_age_s * SECOND_NS,
        "max_bytes": max_bytes,
        "duplicate_window": DUPLICATE_WINDOW_S * SECOND_NS,
        "allow_direct": True,
    }


def table_stream(bucket: str, replicas: int) -> dict[str, Any]:
    """A KV bucket, readable by the stock tools: one value per key, per-key time to live, delete markers."""
    return {
        "name": f"KV_{bucket}",
        "subjects": [f"$KV.{bucket}.>"],
        "retention": "limits",
        "storage": "file",
        "discard": "new",
        "num_replicas": replicas,
        "max_msgs_per_subject": 1,
        "allow_rollup_hdrs": True,
        "deny_delete": True,
        "allow_direct": True,
        "allow_msg_ttl": True,
        "subject_delete_marker_ttl": SECOND_NS,
    }


def blob_stream(bucket: str, replicas: int) -> dict[str, Any]:
    """An object store bucket, readable by the stock tools."""
    return {
        "name": f"OBJ_{bucket}",
        "subjects": [f"$O.{bucket}.C.>", f"$O.{bucket}.M.>"],
        "retention": "limits",
        "storage": "file",
        "discard": "new",
        "num_replicas": replicas,
        "allow_rollup_hdrs": True,
        "allow_direct": True,
    }


async def ensure(client: Client, config: dict[str, Any]) -> None:
    """Create the stream if it is missing. An existing stream is left as its operator set it.

    Raises `StreamMissing` when it does not exist and this client may not create it.
    """
    try:
        await api(client, f"STREAM.INFO.{config['name']}")
        return
    except StreamMissing:
        pass
    try:
        await api(client, f"STREAM.CREATE.{config['name']}", config)
    except AccessDenied as error:
        raise StreamMissing(
            f"stream {config['name']} does not exist, and only the operator may create it: "
            "run `headwater pools` with the operator's key"
        ) from error


async def ensure_namespace(client: Client, ns: str, *, replicas: int = 1) -> None:
    """Streams and buckets that every process of a namespace needs."""
    await ensure(client, table_stream(subjects.lease_bucket(ns), replicas))
    await ensure(client, table_stream(subjects.card_bucket(ns), replicas))
    await ensure(client, blob_stream(subjects.blob_bucket(ns), replicas))
    await ensure(
        client,
        log_stream(
            subjects.request_stream(ns),
            subjects.request_filter(ns),
            max_age_s=REQUEST_MAX_AGE_S,
            max_bytes=REQUEST_MAX_BYTES,
            replicas=replicas,
        ),
    )


async def ensure_pool(
    client: Client, ns: str, pool: str, *, replicas: int = 1, patience_s: float = 0.0
) -> None:
    """The log of one pool. For `patience_s` the operator may make it before this client tries to."""
    await _wait_for(client, subjects.pool_stream(ns, pool), patience_s)
    await ensure(
        client,
        log_stream(
            subjects.pool_stream(ns, pool),
            subjects.pool_filter(ns, pool),
            max_age_s=POOL_MAX_AGE_S,
            max_bytes=POOL_MAX_BYTES,
            replicas=replicas,
        ),
    )


async def _wait_for(client: Client, name: str, patience_s: float) -> None:
    """Return once the stream exists, or patience ends."""
    loop = asyncio.get_running_loop()
    end = loop.time() + patience_s
    while loop.time() < end:
        try:
            await api(client, f"STREAM.INFO.{name}")
            return
        except StreamMissing:
            await asyncio.sleep(POLL_S)


async def stream_names(client: Client, prefix: str) -> list[str]:
    """Names of the streams that start with `prefix`, sorted."""
    found: list[str] = []
    while True:
        answer = await api(client, "STREAM.NAMES", {"offset": len(found)})
        page = answer.get("streams") or []
        found += page
        if len(found) >= int(answer.get("total", 0)) or not page:
            return sorted(name for name in found if name.startswith(prefix))
