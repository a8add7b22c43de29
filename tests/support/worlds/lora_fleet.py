"""Actors of a fleet with LoRA adapters in the test's own process, over a real server, and a client of it.

Each is supervised, as in production: where all share one loop and two cores, a router that lost its lease comes back.
"""

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from headwater.actors.edge.actor import EdgeActor
from headwater.actors.http.server import UvicornServer
from headwater.actors.router.actor import RouterActor
from headwater.actors.runtime.ports import Ports
from headwater.actors.worker.actor import WorkerActor
from headwater.actors.worker.lora import LoraManager, LoraSettings
from headwater.actors.worker.lora_slots import RestartList
from headwater.actors.worker.model_card import Served
from headwater.actors.worker.settings import LoraLoading
from headwater.engines.engine import Engine
from headwater.engines.model_files import byte_model_files
from headwater.engines.sim import StepTime
from headwater.engines.sim.engine import SimSettings
from headwater.engines.sim.model import script
from headwater.events.ports import Record
from headwater.ops.nats.server import open_ports
from headwater.ops.start.actor import compile_kernels
from headwater.schemas.clock import SystemClock
from headwater.schemas.events import Event
from headwater.schemas.names import pool_name
from headwater.schemas.subjects import InboxKind
from tests.support.engines.adapters import LoraSim, files, make_adapter
from tests.support.servers.nats import NatsServer
from tests.support.worlds.lives import Lives

MODEL = "sim"
FILES = byte_model_files(MODEL)
SERVED = Served(MODEL, FILES)


def lora_sim(slots: int) -> LoraSim:
    """A simulated engine that is quick, and has slots for adapters."""
    settings = SimSettings(
        MODEL,
        step_time=StepTime((0.0, 0.01, 1.0), (0.0, 0.0, 3.0)),
        script=script(),
        eos_token_id=FILES.eos_token_ids[0],
    )
    engine = LoraSim(settings, SystemClock())
    engine.slots = slots
    return engine


class Fleet:
    """Actors of one namespace in this process, over connections of their own."""

    def __init__(self, server: NatsServer, folder: Path, stack: AsyncExitStack) -> None:
        self.server = server
        self.folder = folder
        self.sources = folder / "sources"
        self.ns = f"t{secrets.token_hex(4)}"
        self.workers: dict[str, WorkerActor] = {}
        self.url = ""
        self.pool = ""
        self._stack = stack
        self._lives = Lives()

    async def world(self, kind: InboxKind, name: str) -> Ports:
        """The ports of a process."""
        return await self._stack.enter_async_context(open_ports(self.server.url, self.ns, name, kind=kind))

    async def start(self) -> None:
        """Routers and an edge, for the pool of the workers that there are."""
        info = next(iter(self.workers.values())).info
        self.pool = pool_name(info.model, info.block_size)
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        edge = EdgeActor(await self.world("edge", "e"), "e", UvicornServer(listener), drain_s=1.0)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        for name in ("r1", "r2"):
            world = await self.world("router", name)
            await self._lives.start("router", name, partial(RouterActor, world, name, self.pool))
        await self._lives.start("edge", "e", Lives.once(edge))

    async def worker(
        self,
        name: str,
        *,
        on_demand: bool = False,
        slots: int = 2,
        made: tuple[Engine, Served] | None = None,
    ) -> LoraManager:
        """A worker that has joined, with a simulated engine unless one is given; returns its adapters."""
        engine, served = made or (lora_sim(slots), SERVED)
        lora = LoraSettings(
            files(self.folder / "cache", self.sources),
            LoraLoading(on_demand),
            restart_list=RestartList(self.folder / f"{name}.json"),
        )
        actor = WorkerActor(await self.world("worker", name), name, engine, served, drain_s=2.0, lora=lora)
        await self._lives.start("worker", name, Lives.once(actor))
        self.workers[name] = actor
        assert isinstance(actor.lora, LoraManager)
        return actor.lora

    def source(self, name: str) -> str:
        """An adapter with weights of its own."""
        return str(make_adapter(self.sources / name, sum(name.encode())))

    def seen(self, worker: str) -> list[str]:
        """Names of the adapters that the engine of a worker was asked for, "" for none."""
        engine = self.workers[worker].engine
        assert isinstance(engine, LoraSim)
        return [identity.rpartition("@")[0] for identity in engine.seen]

    async def events(self, kind: type[Any]) -> list[Any]:
        """All events of a type in the pool log."""
        log = await (await self.world("operator", f"look{secrets.token_hex(2)}")).pool_log(self.pool)
        found: list[Event] = []
        async for piece in log.read(0, follow=False):
            found += [one for record in piece.records for one in _events_of(record) if isinstance(one, kind)]
        return found

    async def stop(self) -> None:
        """End what was started, the edge first. An engine's end keeps the loop for seconds: the workers last."""
        await self._lives.stop(("edge", "router", "worker"))


def _events_of(record: Record) -> list[Any]:
    """A message's events."""
    return list(record.batch.events)


class Client:
    """Asks models for completions."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    async def ask(self, model: str, prompt: str = "hello", tokens: int = 4) -> httpx.Response:
        """One completion."""
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
        return await self.http.post("/v1/completions", json=body)

    async def answered(self, model: str, prompt: str = "hello", tokens: int = 4) -> str:
        """One completion that must not fail; returns the worker that gave it."""
        response = await self.ask(model, prompt, tokens)
        assert response.status_code == 200, response.text
        assert response.json()["model"] == model
        assert response.json()["usage"]["completion_tokens"] == tokens
        return response.headers["x-headwater-worker"]

    async def models(self) -> list[str]:
        """Names in the list."""
        return [one["id"] for one in (await self.http.get("/v1/models")).json()["data"]]


async def until(holds: Callable[[], Awaitable[bool]], within_s: float = 30.0) -> None:
    """Wait until something is true."""
    async with asyncio.timeout(within_s):
        while not await holds():
            await asyncio.sleep(0.02)


@asynccontextmanager
async def serving(folder: Path, **made: tuple[Engine, Served] | None) -> AsyncIterator[tuple[Fleet, Client]]:
    """A server, routers, an edge and workers: `w1`, or those whose engines are given by name."""
    # Compiling on the loop of all these actors would cost them their leases.
    compile_kernels()
    server = NatsServer(folder / "nats")
    await server.start()
    try:
        async with AsyncExitStack() as stack:
            fleet = Fleet(server, folder, stack)
            try:
                # A worker writes the model's card, without which there is no pool to route for.
                for name, engine in (made or {"w1": None}).items():
                    await fleet.worker(name, made=engine)
                await fleet.start()
                async with httpx.AsyncClient(base_url=fleet.url, timeout=60) as http:
                    yield fleet, Client(http)
            finally:
                await fleet.stop()
    finally:
        server.kill()
