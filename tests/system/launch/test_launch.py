"""`headwater launch`: fleets from a file as real processes, on this machine."""

import asyncio
import os
import signal
import socket
from pathlib import Path

import httpx
import pytest
from msgspec import structs

from headwater.engines import registry
from headwater.ops.launch.fleet_file import PoolOfModel, read_fleet
from headwater.ops.start.sockets import free_port
from tests.support.processes.commands import kill_all, launched, spawn
from tests.support.processes.fleet_files import written
from tests.support.servers.nats import NatsServer

FLEETS = Path(__file__).parents[3] / "deploy" / "fleets"

TWO_MODELS = """
data_dir = "{folder}/data"

[nats]
port = {nats}

[edges]
count = 2
settings.http.port = {port}

[console]
count = 0

[pools.alpha]
routers.count = 2
settings.worker.block_size = 32

[[pools.alpha.workers]]
engine = "sim"
count = 2

[pools.beta]

[[pools.beta.workers]]
engine = "sim"
role = "prefill"

[[pools.beta.workers]]
engine = "sim"
role = "decode"
"""


async def chat(client: httpx.AsyncClient, model: str) -> int:
    """The status of a short answer of a model."""
    body = {"model": model, "max_tokens": 4, "messages": [{"role": "user", "content": "Hello!"}]}
    return (await client.post("/v1/chat/completions", json=body)).status_code


@pytest.mark.timeout(120)
async def test_a_file_runs_two_models_behind_two_edges_of_one_port(tmp_path: Path) -> None:
    """A router of each pool finds its pool by the model's name; an edge that dies leaves its port to the other one."""
    text = TWO_MODELS.format(folder=tmp_path, port=free_port(0), nats=free_port(0))
    (tmp_path / "fleet.toml").write_text(text)
    async with launched(tmp_path, str(tmp_path / "fleet.toml"), command="launch") as fleet:
        async with httpx.AsyncClient(base_url=fleet.url, timeout=30) as client:
            models = [one["id"] for one in (await client.get("/v1/models")).json()["data"]]
            assert models == ["alpha", "beta"]
            assert [await chat(client, model) for model in models] == [200, 200]
        stats = await fleet.until(
            "five routers and edges", lambda found: _named(found, "router-", "edge-") == 5
        )
        assert {one["id"] for one in stats} >= {"router-alpha-1", "router-beta-0", "edge-0", "edge-1"}
        assert listeners(int(fleet.url.rpartition(":")[2])) == 2
        for pid in fleet.pids("--name edge-0")[:1]:
            os.kill(pid, signal.SIGKILL)
        for _ in range(6):
            # A connection for each: the kernel gives some to one edge and some to the other.
            async with httpx.AsyncClient(base_url=fleet.url, timeout=30) as client:
                assert await chat(client, "alpha") == 200
        os.kill(fleet.process.pid, signal.SIGTERM)
        async with asyncio.timeout(30):
            assert await fleet.process.wait() == 0


def listeners(port: int) -> int:
    """How many sockets of this machine listen on a port of IPv4."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[1].endswith(f":{port:04X}") and row[3] == "0A" for row in rows)


def _named(stats: list[dict[str, object]], *prefixes: str) -> int:
    return sum(str(one["id"]).startswith(prefixes) for one in stats)


def simulated(_: str, pool: PoolOfModel) -> PoolOfModel:
    """A pool of simulated engines of the same roles and settings, without what only other engines have."""
    workers = [structs.replace(one, engine="sim", nodes=1, hosts=[], arguments=[]) for one in pool.workers]
    return structs.replace(pool, model="", workers=workers)


EXAMPLES = sorted(FLEETS.rglob("*.toml"))
IN_EVERY_RUN = {"disaggregated", "encode-apart", "multi-node"}


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[] if path.stem in IN_EVERY_RUN else [pytest.mark.soak], id=path.stem)
        for path in EXAMPLES
    ],
)
async def test_every_example_runs_on_the_simulator(path: Path, tmp_path: Path) -> None:
    fleet = read_fleet(path)
    path = written(fleet, tmp_path, simulated)
    async with launched(tmp_path, str(path), command="launch") as up:
        async with httpx.AsyncClient(base_url=up.url, timeout=30) as client:
            models = [one["id"] for one in (await client.get("/v1/models")).json()["data"]]
            assert models == sorted(fleet.pools)
            assert [await chat(client, model) for model in models] == [200] * len(models)


def test_the_simulator_stands_for_engines_that_are_known() -> None:
    """Otherwise an example could name an engine that does not exist."""
    for path in EXAMPLES:
        for pool in read_fleet(path).pools.values():
            assert {one.engine for one in pool.workers} <= set(registry.all_traits())


@pytest.mark.timeout(60)
async def test_a_process_tells_systemd_when_its_actor_is_ready_and_that_it_stops(
    server: NatsServer, tmp_path: Path
) -> None:
    """As units of `Type=notify` want it: an edge is ready when it listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.setblocking(False)
        port = free_port(0)
        environ = {"NOTIFY_SOCKET": str(tmp_path / "notify")}
        process = await spawn("edge", "--nats", server.url, "--port", str(port), environ=environ)
        try:
            told = await _until_told(listener, "READY=1")
            assert "STOPPING=1" not in told
            async with httpx.AsyncClient() as client:
                assert (await client.get(f"http://127.0.0.1:{port}/v1/models")).status_code == 200
            await _until_told(listener, "WATCHDOG=1")
            os.kill(process.pid, signal.SIGTERM)
            await _until_told(listener, "STOPPING=1")
            async with asyncio.timeout(20):
                await process.wait()
        finally:
            await kill_all(process)


async def _until_told(listener: socket.socket, wanted: str) -> list[str]:
    """Everything that systemd was told until then."""
    told: list[str] = []
    async with asyncio.timeout(30):
        while wanted not in told:
            told.append((await asyncio.get_running_loop().sock_recv(listener, 100)).decode())
    return told
