"""Headwater processes beside a fleet's own, started again whenever they end, as an init system does."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec

from headwater.events.jetstream import connect
from headwater.ops.start.children import child_environment
from headwater.ops.start.sockets import free_port
from tests.support.network.hosts import Host
from tests.support.processes import zygote

STOP_S = 40.0
RESTART_S = 0.2


class KeptProcess:
    """One process, started again whenever it ends; `log` holds what all its lives print."""

    def __init__(
        self,
        name: str,
        log: Path,
        arguments: list[str],
        *,
        sglang: bool = False,
        vllm: bool = False,
        host: Host | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """`sglang`: run it in the environment that has SGLang. `vllm`: fork it from a process that has imported vLLM. `host`: run it there.

        `environ`: further variables.
        """
        self.name = name
        self.log = log
        self.lives = 0
        self._arguments = arguments
        self._sglang = sglang
        self._vllm = vllm
        self._start = host.start if host is not None else zygote.start
        self._environ = child_environment() | dict(environ) if environ else None
        self._process: zygote.Process | None = None
        self._stopping = False
        self._task: asyncio.Task[None] | None = None
        self._resumed = asyncio.Event()
        self._resumed.set()

    def hold(self) -> None:
        """Start no next life until `resume`."""
        self._resumed.clear()

    def resume(self) -> None:
        """Start it again whenever it ends."""
        self._resumed.set()

    @property
    def pid(self) -> int:
        """Process id; 0 while it does not run."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else 0

    def start(self) -> None:
        """Begin to keep it running."""
        self._task = asyncio.create_task(self._keep(), name=self.name)

    async def _keep(self) -> None:
        while not self._stopping:
            with self.log.open("ab") as output:
                self._process = await self._start(
                    *self._arguments,
                    stdout=output,
                    stderr=output,
                    environ=self._environ,
                    sglang=self._sglang,
                    vllm=self._vllm,
                )
            self.lives += 1
            await self._process.wait()
            if not self._stopping:
                await asyncio.sleep(RESTART_S)
                await self._resumed.wait()

    async def restart(self) -> None:
        """SIGTERM; returns once the next life was started."""
        lives = self.lives
        os.kill(self.pid, signal.SIGTERM)
        async with asyncio.timeout(STOP_S):
            while self.lives == lives:
                await asyncio.sleep(0.05)

    @staticmethod
    async def run_beside(*arguments: str) -> None:
        """Run another headwater command to its end, which has to be a good one."""
        process = await zygote.start(*arguments, stdout=zygote.PIPE, stderr=zygote.STDOUT)
        async with asyncio.timeout(STOP_S):
            output, _ = await process.communicate()
        assert process.returncode == 0, f"{arguments}: {output.decode()}"

    async def stop(self) -> int:
        """End it in an orderly way; returns its exit code."""
        self._stopping = True
        assert self._task is not None
        while self._process is None and not self._task.done():
            # Its first life is being forked.
            await asyncio.sleep(0.01)
        process = self._process
        assert process is not None
        if process.returncode is None:
            os.kill(process.pid, signal.SIGCONT)
            process.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
            raise
        finally:
            self._task.cancel()
        return process.returncode or 0


@asynccontextmanager
async def kept_edge(
    folder: Path, nats: str, name: str, *flags: str
) -> AsyncIterator[tuple[KeptProcess, str]]:
    """A `headwater edge` on a free port, which its next lives listen on too; gives the process and its URL."""
    port = free_port(0)
    async with _kept("edge", folder, nats, name, "--port", str(port), *flags) as process:
        yield process, f"http://127.0.0.1:{port}"


@asynccontextmanager
async def kept_picker(folder: Path, nats: str, name: str, *flags: str) -> AsyncIterator[KeptProcess]:
    """A `headwater picker`; gives the process."""
    async with _kept("picker", folder, nats, name, *flags) as process:
        yield process


@asynccontextmanager
async def kept_router(folder: Path, nats: str, name: str, *flags: str) -> AsyncIterator[KeptProcess]:
    """A `headwater router`; gives the process."""
    async with _kept("router", folder, nats, name, "--cache-dir", str(folder / "cache"), *flags) as process:
        yield process


@asynccontextmanager
async def kept_worker(folder: Path, nats: str, name: str, *flags: str) -> AsyncIterator[KeptProcess]:
    """A `headwater engine` with the simulated engine; gives the process."""
    async with _kept("engine", folder, nats, name, "--engine", "sim", *flags) as process:
        yield process


@asynccontextmanager
async def kept_sglang_worker(folder: Path, nats: str, name: str, *flags: str) -> AsyncIterator[KeptProcess]:
    """A `headwater engine sglang`; gives the process. `flags` may end with `--` and arguments of SGLang."""
    async with _kept("engine", folder, nats, name, "--engine", "sglang", *flags, sglang=True) as process:
        yield process


@asynccontextmanager
async def kept_vllm_worker(folder: Path, nats: str, name: str, *flags: str) -> AsyncIterator[KeptProcess]:
    """A `headwater engine vllm` with one worker; gives the process."""
    one = ("--engine", "vllm", "--workers", "1")
    async with _kept("engine", folder, nats, name, *one, *flags, vllm=True) as process:
        yield process


@asynccontextmanager
async def _kept(
    kind: str, folder: Path, nats: str, name: str, *flags: str, sglang: bool = False, vllm: bool = False
) -> AsyncIterator[KeptProcess]:
    common = [kind, "--name", name, "--nats", nats, "--log-format", "json"]
    process = KeptProcess(name, folder / f"{name}.log", [*common, *flags], sglang=sglang, vllm=vllm)
    process.start()
    try:
        yield process
    finally:
        await process.stop()


async def ready_actors(nats: str) -> list[str]:
    """The service name of every actor that says it is ready, such as `headwater-worker`."""
    client = await connect(nats, "test")
    found = []
    try:
        inbox = client.new_inbox()
        replies = await client.subscribe(inbox)
        await client.publish("$SRV.STATS", b"", reply=inbox)
        while True:
            message = await replies.next_msg(timeout=0.3)
            if not message.data:
                # The server's word that nobody listens yet.
                return []
            answer = msgspec.json.decode(message.data)
            if answer["endpoints"][0]["data"].get("state", "ready") == "ready":
                found.append(answer["name"])
    except TimeoutError:
        return sorted(found)
    finally:
        await client.close()


async def until_ready(nats: str, wanted: Mapping[str, int], *, within_s: float = 60) -> None:
    """Wait until so many actors of each kind say that they are ready."""
    deadline = time.monotonic() + within_s
    while True:
        ready = await ready_actors(nats)
        if all(ready.count(f"headwater-{kind}") >= number for kind, number in wanted.items()):
            return
        assert time.monotonic() < deadline, f"{wanted} not ready within {within_s} s, only {ready}"
        await asyncio.sleep(0.1)


async def until_healthy(url: str, *, workers: int = 1, within_s: float = 60) -> float:
    """Wait until an edge serves so many workers; returns the seconds that took."""
    began = time.monotonic()
    async with httpx.AsyncClient(base_url=url, timeout=2) as client:
        while True:
            told = await _health(client)
            if told.get("status") == "ok" and sum(told.get("workers", {}).values()) >= workers:
                return time.monotonic() - began
            assert time.monotonic() < began + within_s, f"{url} is not healthy after {within_s} s: {told}"
            await asyncio.sleep(0.05)


async def _health(client: httpx.AsyncClient) -> dict[str, Any]:
    try:
        document: dict[str, Any] = (await client.get("/health")).json()
    except (httpx.TransportError, ValueError):
        return {}
    return document
