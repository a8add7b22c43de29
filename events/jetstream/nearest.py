"""Which servers of a cluster are on this machine, and are connected to first: a connection to another host is lost with that host, or with the way to it."""

import asyncio
import random
import socket
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

from headwater.schemas.addresses import NATS_PORT, is_loopback

LOOK_UP_S: Final = 1.0
"""How long names are looked up to order servers; what is not known by then counts as far."""


def own_address_towards(host: str, port: int) -> str:
    """The address of this machine from which it reaches a server; empty if the server is on this machine. Nothing is sent. Raises `OSError`."""
    family, _, _, _, there = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(there)
        own = str(probe.getsockname()[0])
    return "" if own == there[0] or is_loopback(str(there[0])) else own


def address_towards_any(urls: Iterable[str]) -> str:
    """`own_address_towards` all of these servers: empty if one of them is on this machine, or none can be looked up."""
    own = ""
    for url in urls:
        try:
            own = _towards(url)
        except (OSError, ValueError):
            continue  # whoever connects will say so
        if not own:
            break
    return own


async def nearest_first(urls: list[str]) -> list[str]:
    """Servers on this machine first, and the others in a random order, so that processes are spread over them."""
    others = random.sample(urls, len(urls))
    if len(others) < 2:
        return others
    try:
        async with asyncio.timeout(LOOK_UP_S):
            near = await asyncio.gather(*(asyncio.to_thread(_is_here, url) for url in others))
    except TimeoutError:
        return others
    return [url for _, url in sorted(zip(near, others, strict=True), key=lambda one: not one[0])]


def _is_here(url: str) -> bool:
    try:
        return not _towards(url)
    except (OSError, ValueError):
        return False


def _towards(url: str) -> str:
    parts = urlsplit(url.strip())
    return own_address_towards(parts.hostname or "", parts.port or NATS_PORT)
