"""One NATS connection with the settings every Headwater process uses."""

import asyncio

import structlog
from nats.aio.client import Client
from nats.errors import Error as NatsError

from headwater.events.errors import LogUnavailable

PENDING_BYTES_MAX = 16 * 1024 * 1024
"""Bytes buffered while the server is away; beyond, publishing raises instead of growing."""

_log = structlog.get_logger("headwater.nats")


async def connect(url: str, name: str, *, wait_s: float = 10.0) -> Client:
    """Connect and stay connected: reconnects for ever, notices a dead peer within ten seconds.

    `url` may name several servers of one cluster, separated by commas; any of them will do. Raises
    `LogUnavailable` when no server answers within `wait_s`, naming the URL.
    """

    async def on_error(error: Exception) -> None:
        if not isinstance(error, ConnectionError | asyncio.TimeoutError):
            _log.warning("nats_error", error=repr(error), connection=name)

    async def on_disconnect() -> None:
        if not closing():
            _log.warning("nats_disconnected", connection=name)

    async def on_reconnect() -> None:
        _log.info("nats_reconnected", connection=name)

    def closing() -> bool:
        return client.is_closed or client.is_draining

    client = Client()
    try:
        # Without the deadline nats-py would go on trying for ever.
        async with asyncio.timeout(wait_s):
            await client.connect(
                [one.strip() for one in url.split(",") if one.strip()],
                name=name,
                allow_reconnect=True,
                max_reconnect_attempts=-1,
                reconnect_time_wait=1,
                connect_timeout=2,
                ping_interval=5,
                max_outstanding_pings=2,
                pending_size=PENDING_BYTES_MAX,
                error_cb=on_error,
                disconnected_cb=on_disconnect,
                reconnected_cb=on_reconnect,
            )
    except (TimeoutError, OSError, NatsError) as error:
        raise LogUnavailable(
            f"no NATS server answers at {url} within {wait_s:.0f} s; "
            "start one, or let `headwater up` start its own"
        ) from error
    return client
