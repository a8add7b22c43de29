"""nats-py's names, for all modules of Headwater that use it.

nats-py imports aiohttp, which it needs for URLs of WebSockets only and which takes as long as all the rest of it. Here it is
imported when it is used.
"""

import sys
from importlib import import_module
from typing import Any

_aiohttp = sys.modules.get("aiohttp")
# Its import fails, as where it is not installed.
sys.modules["aiohttp"] = None  # type: ignore[assignment]
try:
    from nats.aio import transport
    from nats.aio.client import DEFAULT_FLUSH_TIMEOUT, Client
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription
    from nats.errors import ConnectionClosedError, MaxPayloadError, NoRespondersError
    from nats.errors import Error as NatsError
    from nats.protocol.parser import PERMISSIONS_ERR, STALE_CONNECTION
finally:
    del sys.modules["aiohttp"]
    if _aiohttp is not None:
        sys.modules["aiohttp"] = _aiohttp

__all__ = [
    "DEFAULT_FLUSH_TIMEOUT",
    "PERMISSIONS_ERR",
    "STALE_CONNECTION",
    "Client",
    "ConnectionClosedError",
    "MaxPayloadError",
    "Msg",
    "NatsError",
    "NoRespondersError",
    "Subscription",
]


class _Aiohttp:
    def __getattr__(self, name: str) -> Any:
        return getattr(import_module("aiohttp"), name)


vars(transport)["aiohttp"] = _Aiohttp()
