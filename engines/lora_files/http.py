"""Files over HTTP(S), from public addresses only: a source must not make a worker access its private network.

The address is checked when the socket is created. This covers names that resolve to private addresses, names that resolve
differently the second time, numeric addresses, and every hop of a redirect.
"""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin

from headwater.engines.engine import EngineUnavailable
from headwater.engines.lora_files.budget import Budget
from headwater.engines.lora_files.errors import LoraError, SourceMissing
from headwater.engines.lora_files.peft import CHUNK_BYTES
from headwater.engines.lora_files.policy import LoraPolicy, Source

if TYPE_CHECKING:
    import aiohttp

REDIRECTS_MAX = 5
CONNECT_S = 10.0
SILENCE_S = 30.0

NAT64 = ip_network("64:ff9b::/96")

Address = IPv4Address | IPv6Address


class HttpOrigin:
    """Files below a base URL, or an archive at it. A redirect must lead to an allowed source."""

    def __init__(self, source: Source, policy: LoraPolicy) -> None:
        self._source = source
        self._policy = policy

    async def save(self, name: str, to: Path, budget: Budget) -> None:
        """See `origins.Origin.save`."""
        url = self._source.text.rstrip("/") + (f"/{name}" if name else "")
        async with _session(self._policy) as (session, refused):
            for _ in range(REDIRECTS_MAX + 1):
                try:
                    onward = await _get(session, url, to, budget)
                except (OSError, _client_error()) as error:
                    if refused:
                        raise LoraError(403, _not_public(url, refused[0])) from error
                    raise LoraError(502, f"{url}: {error}") from error
                if not onward:
                    return
                url = urljoin(url, onward)
                self._policy.admit(url)
        raise LoraError(502, f"{self._source.text} redirects more than {REDIRECTS_MAX} times")

    async def names(self) -> list[str]:
        """See `origins.Origin.names`: a web server has no listing."""
        return []


def allowed(address: str, policy: LoraPolicy) -> bool:
    """May a socket be connected to this address?"""
    found = _inner(ip_address(address.partition("%")[0]))
    if any(found.version == network.version and found in network for network in policy.networks):
        return True
    return found.is_global and not found.is_multicast


def _inner(address: Address) -> Address:
    """The IPv4 address embedded in an IPv6 address, if any."""
    if isinstance(address, IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
        if address in NAT64:
            inner = IPv4Address(int(address) & 0xFFFFFFFF)
        return inner or address
    return address


@asynccontextmanager
async def _session(policy: LoraPolicy) -> AsyncIterator[tuple["aiohttp.ClientSession", list[str]]]:
    """A session for one file, and the addresses that were rejected."""
    aiohttp = _aiohttp()
    refused: list[str] = []

    def make(info: Any) -> socket.socket:
        family, kind, protocol, _, address = info
        if not allowed(address[0], policy):
            refused.append(address[0])
            raise PermissionError(f"{address[0]} is not a public address")
        return socket.socket(family, kind, protocol)

    timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_S, sock_read=SILENCE_S)
    connector = aiohttp.TCPConnector(socket_factory=make, limit=1)
    # Without the environment's proxies: with one, the checked address would be the proxy's.
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, trust_env=False, auto_decompress=False
    ) as session:
        yield session, refused


async def _get(session: "aiohttp.ClientSession", url: str, to: Path, budget: Budget) -> str:
    """Save the file at `url`; returns the target of a redirect instead."""
    headers = {"accept-encoding": "identity"}
    async with session.get(url, allow_redirects=False, headers=headers) as response:
        if response.status in (301, 302, 303, 307, 308) and "location" in response.headers:
            return response.headers["location"]
        if response.status in (404, 410):
            raise SourceMissing(url)
        if response.status != 200:
            raise LoraError(502, f"{url} answers {response.status} {response.reason}")
        with to.open("xb") as file:
            async for chunk in response.content.iter_chunked(CHUNK_BYTES):
                budget.spend(len(chunk))
                file.write(chunk)
    return ""


def _not_public(url: str, address: str) -> str:
    return f"{url} is at {address}, which is not a public address; --lora-networks allows further networks"


def _client_error() -> type[Exception]:
    error: type[Exception] = _aiohttp().ClientError
    return error


def _aiohttp() -> Any:
    try:
        import aiohttp
    except ImportError as error:
        raise EngineUnavailable("adapters over HTTP need aiohttp: pip install 'headwater[lora]'") from error
    return aiohttp
