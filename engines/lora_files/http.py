"""Files over HTTP(S), from public addresses only: a source must not make a worker access its private network.

The address is checked when the socket is created. This covers names that resolve to private addresses, names that resolve
differently the second time, numeric addresses, and every hop of a redirect.
"""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin

from headwater.engines.engine import EngineUnavailable
from headwater.engines.lora_files.budget import Budget
from headwater.engines.lora_files.errors import LoraError, SourceMissing
from headwater.engines.lora_files.peft import CHUNK_BYTES
from headwater.engines.lora_files.policy import LoraPolicy, Source
from headwater.engines.public_address import may_connect

if TYPE_CHECKING:
    import aiohttp

REDIRECTS_MAX = 5
CONNECT_S = 10.0
SILENCE_S = 30.0


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


@asynccontextmanager
async def _session(policy: LoraPolicy) -> AsyncIterator[tuple["aiohttp.ClientSession", list[str]]]:
    """A session for one file, and the addresses that were rejected."""
    aiohttp = _aiohttp()
    refused: list[str] = []

    def make(info: Any) -> socket.socket:
        family, kind, protocol, _, address = info
        if not may_connect(address[0], policy.networks):
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
