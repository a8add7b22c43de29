"""One simulated fleet under load, its console, and one browser, for all tests of this folder."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Mapping
from itertools import count
from typing import NamedTuple

import httpx
import pytest
import pytest_asyncio
from playwright.async_api import Browser

from tests.console.browser import Console, chromium
from tests.support.processes import zygote
from tests.support.processes.fleet import FleetProcess, fleet

PROMPTS = ("You sell garden tools. " * 40, "Summarise the report in three sentences. " * 20)
HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'
TOKEN = "a-token-of-the-tests"


class Up(NamedTuple):
    """A fleet and the address of its console."""

    fleet: FleetProcess
    console: str


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def up(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Up]:
    """A fleet with three workers."""
    port = free_port()
    flags = ("--engine", "sim", "--workers", "3", "--console-port", str(port))
    async with fleet(tmp_path_factory.mktemp("console"), *flags) as running:
        yield Up(running, f"http://127.0.0.1:{port}")


async def _load(running: FleetProcess) -> None:
    """Two requests a second, until cancelled: of the three lengths some are always open."""
    async with running.client() as client, asyncio.TaskGroup() as group:
        for number in count():
            prompt = f"{PROMPTS[number % 2]} {number % 7} {HOSTILE}"
            body = {"model": "sim", "prompt": prompt, "max_tokens": (20, 90, 300)[number % 3]}
            group.create_task(_post(client, body))
            await asyncio.sleep(0.5)


async def _post(client: httpx.AsyncClient, body: Mapping[str, object]) -> None:
    # The fleet may end before the load.
    with contextlib.suppress(httpx.HTTPError):
        await client.post("/v1/completions", json=body)


@pytest_asyncio.fixture(scope="package", loop_scope="package", autouse=True)
async def load(up: Up) -> AsyncIterator[None]:
    """Live load for as long as the tests run."""
    task = asyncio.create_task(_load(up.fleet))
    await asyncio.sleep(2)
    yield
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def browser() -> AsyncIterator[Browser]:
    """The browser."""
    async with chromium() as started:
        yield started


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def console(up: Up, browser: Browser, load: None) -> AsyncIterator[Console]:
    """The fleet's own console, which everyone on this machine may read."""
    async with httpx.AsyncClient(base_url=up.console) as client:
        pools = (await client.get("/api/pools")).json()["pools"]
    made = Console(up.console, browser, pools[0]["pool"])
    yield made
    await made.close()


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def guarded(
    up: Up, browser: Browser, console: Console, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Console]:
    """Another console of the same fleet, which wants a token and lets its holder control workers."""
    tokens = tmp_path_factory.mktemp("guarded") / "tokens"
    tokens.write_text(f"operator {TOKEN}\n")
    port = free_port()
    process = await zygote.start(
        *(
            "console",
            "--nats",
            up.fleet.nats,
            "--console-port",
            str(port),
            "--console-token-file",
            str(tokens),
        ),
        stderr=zygote.STDOUT,
    )
    url = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=url) as client:
        async with asyncio.timeout(30):
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if (await client.get("/")).status_code == 200:
                        break
                await asyncio.sleep(0.05)
    made = Console(url, browser, console.pool)
    yield made
    await made.close()
    process.terminate()
    await process.wait()
