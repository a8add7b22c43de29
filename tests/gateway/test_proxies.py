"""Proxies in front of edges, with the configurations of the documentation: what a stream needs of them."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
import pytest
import pytest_asyncio
from websockets.asyncio.client import connect

from headwater.ops.start.sockets import free_port
from tests.support.clients import raw_http
from tests.support.processes.fleet import FleetProcess, fleet
from tests.support.processes.restarted import kept_edge, until_healthy
from tests.support.processes.tools import running

pytestmark = [
    pytest.mark.processes,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(120),
    pytest.mark.soak,
]

ROOT: Final = Path(__file__).parents[2]
EXAMPLES: Final = ROOT / "examples" / "proxies"
WHEELS: Final = ROOT / ".proxies" / "bin"

LONG: Final = {"model": "sim", "prompt": "Where does it end? ", "max_tokens": 20_000, "ignore_eos": True}
"""Lasts for minutes: whatever comes of it before was not held."""

EVENTS: Final = 60
EVENTS_AT_ONCE: Final = 8
"""On average. An event has some 200 bytes, and what buffers does so by kilobytes."""

PROXIES: Final[dict[str, tuple[tuple[str, ...], ...]]] = {
    "nginx": (
        ("nginx.conf",),
        ("nginx", "-p", ".", "-e", "errors", "-c", "nginx.conf", "-g", "daemon off; pid nginx.pid;"),
    ),
    "haproxy": (("haproxy.cfg",), ("haproxy", "-db", "-f", "haproxy.cfg")),
    "caddy": (("Caddyfile",), ("caddy", "run", "--config", "Caddyfile")),
    "traefik": (("traefik.yaml", "traefik-edges.yaml"), ("traefik", "--configFile=traefik.yaml")),
}
"""The files of each proxy, and its command line."""


class Edges:
    """A fleet with two edges."""

    def __init__(self, up: FleetProcess, ports: tuple[int, int], folder: Path) -> None:
        self.up = up
        self.ports = ports
        self.folder = folder

    async def until_idle(self) -> None:
        """Wait until no edge has a request and no worker runs one."""
        names = ("active_requests", "streams", "running", "waiting")
        await self.up.until(
            "nothing is left", lambda s: not any(one.get(name) for one in s for name in names)
        )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def edges(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Edges]:
    folder = tmp_path_factory.mktemp("proxies")
    async with (
        fleet(folder, "--engine", "sim", "--workers", "1") as up,
        kept_edge(folder, up.nats, "edge-b") as (_, url),
    ):
        await until_healthy(url)
        yield Edges(up, (int(up.url.rpartition(":")[2]), int(url.rpartition(":")[2])), folder)


@asynccontextmanager
async def proxy(name: str, edges: Edges) -> AsyncIterator[str]:
    """The proxy with the example's files, but for the ports; gives its URL."""
    files, line = PROXIES[name]
    program = WHEELS / line[0] if (WHEELS / line[0]).exists() else shutil.which(line[0])
    assert program, f"these tests need {name}: make proxies, or apt-get install {name}"
    folder, port = edges.folder / name, free_port(0)
    folder.mkdir()
    for file in files:
        text = (EXAMPLES / file).read_text()
        for documented, used in ((8000, edges.ports[0]), (8001, edges.ports[1]), (8080, port)):
            text = text.replace(f":{documented}", f":{used}")
        (folder / file).write_text(text)
    log = folder / "log"
    url = f"http://127.0.0.1:{port}"
    async with running(log, str(program), *line[1:], cwd=folder) as process:
        async with httpx.AsyncClient(base_url=url) as client, asyncio.timeout(20):
            while True:
                assert process.returncode is None, log.read_text()
                try:
                    if (await client.get("/v1/models")).status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.02)
        yield url


async def read_events(client: raw_http.Connection) -> tuple[int, int]:
    """Read `EVENTS` events; returns how many there were, and in how many pieces they came."""
    events = pieces = 0
    async with asyncio.timeout(60):
        while events < EVENTS:
            data = await client.reader.read(65_536)
            assert data, "the proxy closed the connection"
            events += data.count(b"data: {")
            pieces += b"data: {" in data
    return events, pieces


@pytest.mark.parametrize("name", PROXIES)
async def test_streams_pass_a_proxy(edges: Edges, name: str) -> None:
    """Each event by itself, from the first on; a client that leaves is seen at the edge; large bodies, errors and WebSockets pass."""
    async with proxy(name, edges) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        for path in ("/v1/completions", "/v1/chat/completions"):
            body: dict[str, Any] = {**LONG, "stream": True}
            if path == "/v1/chat/completions":
                body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
            async with raw_http.connection(url) as stream:
                await stream.send(raw_http.request(msgspec.json.encode(body), path=path))
                status, headers = await stream.head()
                assert (status, headers["content-type"].partition(";")[0]) == (200, "text/event-stream")
                events, pieces = await read_events(stream)
                assert events <= EVENTS_AT_ONCE * pieces, f"{events} events came in {pieces} pieces"
                stream.reset() if path == "/v1/completions" else stream.close()
            await edges.until_idle()
        # Before the answer has begun.
        async with raw_http.connection(url) as waiting:
            await waiting.send(raw_http.request(msgspec.json.encode(LONG), path="/v1/completions"))
            await edges.up.until("it runs", lambda s: any(one.get("running") for one in s))
            waiting.close()
        await edges.until_idle()
        large = {**LONG, "max_tokens": 1, "metadata": {"note": "x" * 3_000_000}}
        answer = await client.post("/v1/completions", json=large)
        assert answer.status_code == 200, answer.text
        refused = await client.post("/v1/completions", json={"model": "sim"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
        async with connect(url.replace("http", "ws") + "/v1/responses") as socket:
            await socket.send(b'{"type": "response.create", "model": "sim", "input": "Hello"}'.decode())
            assert msgspec.json.decode(await socket.recv())["type"] == "response.created"
    await edges.until_idle()
