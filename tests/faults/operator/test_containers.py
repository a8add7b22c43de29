"""Processes in containers as they come: process 1, a long host name, no home, a read-only root, a user without a name, few descriptors."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest

from headwater.ops.start.sockets import free_range
from tests.support.processes.fleet import descendants
from tests.support.processes.surroundings import container, environment, has_namespaces
from tests.support.servers.nats import NatsServer

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not has_namespaces(), reason="needs a name, process ids and mounts of its own"),
]

READY_S = 60.0
HOST = "headwater-worker-of-the-second-largest-model-in-europe-west-4"
"""As a cluster derives it from a deployment: the names of two replicas differ at their end, those of restarted or copied ones not at all."""


class Contained:
    """A process in a container of its own."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self.process = process
        self.log = log

    async def stop(self) -> int:
        """SIGTERM to process 1; its exit code."""
        for pid in descendants(self.process.pid)[:1]:
            os.kill(pid, signal.SIGTERM)
        async with asyncio.timeout(30):
            return await self.process.wait()


@asynccontextmanager
async def contained(folder: Path, host: str, *words: str) -> AsyncIterator[Contained]:
    """A headwater command in a container."""
    folder.mkdir()
    log = folder.with_suffix(".log")
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *container(folder, host),
            sys.executable,
            "-m",
            "headwater.ops.cli",
            *words,
            env=environment({"HOME": None, "USER": None, "LOGNAME": None}, folder),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        yield Contained(process, log)
    finally:
        with contextlib.suppress(ProcessLookupError):
            # Process 1 goes with it, and with that one all of its container.
            process.kill()
        await process.wait()


async def _healthy(url: str, workers: int, processes: list[Contained]) -> None:
    """Wait until the edge has so many workers."""
    deadline = time.monotonic() + READY_S
    health: object = None
    async with httpx.AsyncClient() as client:
        while True:
            with contextlib.suppress(httpx.TransportError):
                health = (await client.get(f"{url}/health")).json()
                if isinstance(health, dict) and sum(health.get("workers", {}).values()) == workers:
                    return
            for one in processes:
                assert one.process.returncode is None, one.log.read_text()[-2000:]
            logs = "\n".join(one.log.read_text()[-600:] for one in processes)
            assert time.monotonic() < deadline, f"{health}\n{logs}"
            await asyncio.sleep(0.05)


@pytest.mark.timeout(240)
async def test_a_fleet_of_containers_serves(tmp_path: Path) -> None:
    """With a NATS server as it comes; two workers of one host name are two workers, and each process ends when it is told to."""
    (tmp_path / "nats").mkdir()
    port = free_range(2, "127.0.0.1")
    config = tmp_path / "nats" / "plain.conf"
    store = str(tmp_path / "nats" / "store")
    config.write_text(json.dumps({"listen": f"127.0.0.1:{port}", "jetstream": {"store_dir": store}}))
    server = NatsServer(tmp_path / "nats", port=port, config=config)
    await server.start()
    url = f"http://127.0.0.1:{port + 1}"
    client = ("--nats", server.url)
    try:
        async with AsyncExitStack() as stack:
            processes = [
                await stack.enter_async_context(contained(tmp_path / name, host, *words, *client))
                for name, host, words in (
                    ("edge", "edge", ("edge", "--port", str(port + 1))),
                    ("router", "router", ("router",)),
                    ("worker-a", HOST, ("engine", "sim")),
                    ("worker-b", HOST, ("engine", "sim")),
                )
            ]
            await _healthy(url, 2, processes)
            async with httpx.AsyncClient(base_url=url) as http:
                body = {"model": "sim", "prompt": "Where does a river begin?", "max_tokens": 8}
                answer = await http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            codes = [await one.stop() for one in processes]
            assert codes == [0, 0, 143, 143], [one.log.read_text()[-600:] for one in processes]
    finally:
        server.stop()
