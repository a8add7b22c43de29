"""LoRA adapters in a fleet on a real server: loaded on workers, routed to them, unloaded under load, forgotten."""

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from headwater.actors.actor import Actor
from headwater.actors.adapter_memory import AdapterMemory
from headwater.actors.adapters import Adapters, AdapterSettings
from headwater.actors.cards import Served
from headwater.actors.edge.actor import EdgeActor
from headwater.actors.edge.server import UvicornServer
from headwater.actors.engine import EngineActor
from headwater.actors.router import RouterActor
from headwater.actors.world import World
from headwater.engines.adapter_files import AdapterError
from headwater.engines.sim import SimSettings
from headwater.engines.sim_model import script, sim_model_files
from headwater.engines.step_time import StepTime
from headwater.events.clock import SystemClock
from headwater.events.log import Record
from headwater.ops.warm import compile_kernels
from headwater.ops.world import open_world
from headwater.schemas.envelope import Event
from headwater.schemas.fleet import WorkerChanged
from headwater.schemas.names import pool_name
from headwater.schemas.route import Decision
from headwater.schemas.subjects import InboxKind
from tests.support.adapters import LoraSim, files, make_adapter
from tests.support.nats import NatsServer

MODEL = "sim"
POOL = pool_name(MODEL, 16)
FILES = sim_model_files(MODEL)


class Fleet:
    """Actors of one namespace in this process, over connections of their own."""

    def __init__(self, server: NatsServer, folder: Path, stack: AsyncExitStack) -> None:
        self.server = server
        self.folder = folder
        self.sources = folder / "sources"
        self.ns = f"t{secrets.token_hex(4)}"
        self.workers: dict[str, EngineActor] = {}
        self.url = ""
        self._stack = stack
        self._lives: list[tuple[Actor, asyncio.Task[None]]] = []

    async def world(self, kind: InboxKind, name: str) -> World:
        """The ports of a process."""
        return await self._stack.enter_async_context(open_world(self.server.url, self.ns, name, kind=kind))

    async def run(self, actor: Actor) -> None:
        """Start an actor, and wait until it is ready."""
        self._lives.append((actor, asyncio.create_task(_live(actor))))
        async with asyncio.timeout(20):
            await actor.ready.wait()

    async def start(self) -> None:
        """A router and an edge."""
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        edge = EdgeActor(await self.world("edge", "e"), "e", UvicornServer(listener), drain_s=1.0)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        # Where everything shares two cores, one may lose its lease and end: the other goes on.
        for name in ("r1", "r2"):
            await self.run(RouterActor(await self.world("router", name), name, POOL))
        await self.run(edge)

    async def worker(self, name: str, *, on_demand: bool = False, slots: int = 2) -> Adapters:
        """A worker that has joined; returns its adapters."""
        step_time = StepTime((0.0, 0.01, 1.0), (0.0, 0.0, 3.0))
        settings = SimSettings(
            MODEL, step_time=step_time, script=script(), eos_token_id=FILES.eos_token_ids[0]
        )
        engine = LoraSim(settings, SystemClock())
        engine.slots = slots
        lora = AdapterSettings(
            files(self.folder / "cache", self.sources),
            on_demand,
            memory=AdapterMemory(self.folder / f"{name}.json"),
        )
        world = await self.world("worker", name)
        actor = EngineActor(world, name, engine, Served(MODEL, FILES), drain_s=2.0, lora=lora)
        await self.run(actor)
        self.workers[name] = actor
        assert actor.adapters is not None
        return actor.adapters

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
        log = await (await self.world("operator", f"look{secrets.token_hex(2)}")).pool_log(POOL)
        found: list[Event] = []
        async for piece in log.read(0, follow=False):
            found += [one for record in piece.records for one in events_of(record) if isinstance(one, kind)]
        return found

    async def stop(self) -> None:
        """End what was started, the edge first."""
        for actor, life in sorted(self._lives, key=lambda pair: pair[0].kind != "edge"):
            actor.stop()
            await life


async def _live(actor: Actor) -> None:
    await actor.run()
    assert actor.unexpected == []


def events_of(record: Record) -> list[Any]:
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


async def until(holds: Callable[[], Awaitable[bool]], within_s: float = 10.0) -> None:
    """Wait until something is true."""
    async with asyncio.timeout(within_s):
        while not await holds():
            await asyncio.sleep(0.02)


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[Fleet, Client]]:
    """A server, a router and an edge; workers are added by the test."""
    # Compiling on the loop of all these actors would cost them their leases.
    compile_kernels()
    server = NatsServer(folder / "nats")
    await server.start()
    try:
        async with AsyncExitStack() as stack:
            fleet = Fleet(server, folder, stack)
            try:
                # The first worker writes the model's card, without which there is no pool to route for.
                await fleet.worker("w1")
                await fleet.start()
                async with httpx.AsyncClient(base_url=fleet.url, timeout=30) as http:
                    yield fleet, Client(http)
            finally:
                await fleet.stop()
    finally:
        server.kill()


async def test_requests_go_to_the_worker_that_holds_their_adapter(tmp_path: Path) -> None:
    """Two adapters on two workers, each a model of its own, each with blocks of its own."""
    async with serving(tmp_path) as (fleet, client):
        one = fleet.workers["w1"].adapters
        assert one is not None
        two = await fleet.worker("w2")
        assert await client.models() == [MODEL]
        assert (await client.ask("alpha")).status_code == 404
        await one.load("alpha", fleet.source("alpha"))
        await two.load("beta", fleet.source("beta"))
        await until(lambda: listed(client, [MODEL, "alpha", "beta"]))
        prompt = "the same prompt for everybody " * 4
        for _ in range(4):
            assert await client.answered("alpha", prompt) == "w1"
            assert await client.answered("beta", prompt) == "w2"
        assert set(fleet.seen("w1")) == {"alpha"}
        assert set(fleet.seen("w2")) == {"beta"}
        response = await client.ask(MODEL, prompt)
        assert response.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, (
            "adapters' blocks are theirs"
        )
        again = await client.ask("alpha", prompt)
        assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        held = {event.worker: event.loras for event in await fleet.events(WorkerChanged)}
        assert [name.rpartition("@")[0] for name in held["w1"] + held["w2"]] == ["alpha", "beta"]
        decisions = [one for one in await fleet.events(Decision) if one.lora_name]
        assert {(one.lora_name, one.worker) for one in decisions} == {
            (held["w1"][0], "w1"),
            (held["w2"][0], "w2"),
        }


async def listed(client: Client, names: list[str]) -> bool:
    """Are these the models?"""
    return await client.models() == names


async def test_unloading_under_load_fails_no_request(tmp_path: Path) -> None:
    """What runs there ends there, what comes later goes to the other holder, and the adapter comes back."""
    async with serving(tmp_path) as (fleet, client):
        one = fleet.workers["w1"].adapters
        assert one is not None
        two = await fleet.worker("w2")
        for adapters in (one, two):
            await adapters.load("alpha", fleet.source("alpha"))
        await until(lambda: listed(client, [MODEL, "alpha"]))
        stop = asyncio.Event()
        answers: list[str] = []

        async def load(number: int) -> None:
            while not stop.is_set():
                answers.append(await client.answered("alpha", f"user {number} " * 20, tokens=20))

        async with asyncio.TaskGroup() as group:
            for number in range(12):
                group.create_task(load(number))
            await until(lambda: both(answers))
            for adapters, other in ((one, "w2"), (two, "w1")):
                await adapters.unload("alpha")
                assert await adapters.list() == []
                seen = len(answers)
                await until(lambda seen=seen: more(answers, seen + 24))  # type: ignore[misc]
                assert set(answers[seen + 12 :]) == {other}, "the log tells routers, and they were told"
                await adapters.load("alpha", fleet.source("alpha"))
            stop.set()
        assert len(answers) > 40


async def both(answers: list[str]) -> bool:
    """Have both workers answered?"""
    return set(answers) == {"w1", "w2"}


async def more(answers: list[str], count: int) -> bool:
    """Are there so many answers?"""
    return len(answers) >= count


async def test_an_adapter_is_loaded_when_a_request_names_it(tmp_path: Path) -> None:
    """By a worker that may, from where its card says; with its slots full another one goes."""
    async with serving(tmp_path) as (fleet, client):
        one = fleet.workers["w1"].adapters
        assert one is not None
        for name in ("alpha", "beta"):
            await one.load(name, fleet.source(name))
            await one.unload(name)
        await until(lambda: listed(client, [MODEL, "alpha", "beta"]))
        refused = await client.ask("alpha")
        assert refused.status_code == 503
        assert "holds or may load adapter alpha@" in refused.json()["error"]["message"]
        two = await fleet.worker("w2", on_demand=True, slots=1)
        assert await client.answered("alpha") == "w2"
        assert [(one["name"], one["on_demand"]) for one in await two.list()] == [("alpha", True)]
        assert await client.answered("beta") == "w2"
        assert [one["name"] for one in await two.list()] == ["beta"]
        answers = await asyncio.gather(*(client.answered(name) for name in ("alpha", "beta", MODEL) * 3))
        assert {"w2"} <= set(answers) <= {"w1", "w2"}
        decisions = [one for one in await fleet.events(Decision) if one.lora_name]
        assert any(one.chosen.loads_lora for one in decisions)


async def test_a_forgotten_adapter_is_gone_everywhere(tmp_path: Path) -> None:
    """From the models at once, from all workers as soon as nobody uses it; then the name is free."""
    async with serving(tmp_path) as (fleet, client):
        one = fleet.workers["w1"].adapters
        assert one is not None
        two = await fleet.worker("w2")
        for adapters in (one, two):
            await adapters.load("alpha", fleet.source("alpha"))
        with pytest.raises(AdapterError, match="sim is a model"):
            await one.load(MODEL, fleet.source("alpha"))
        await until(lambda: listed(client, [MODEL, "alpha"]))
        await one.unload("alpha", forget=True)
        await until(lambda: listed(client, [MODEL]))
        refused = await client.ask("alpha")
        assert refused.status_code == 404
        assert "Served: sim" in refused.json()["error"]["message"]
        await until(lambda: holds_nothing(two))
        await two.load("alpha", fleet.source("other"))
        await until(lambda: listed(client, [MODEL, "alpha"]))
        assert await client.answered("alpha") == "w2"


async def holds_nothing(adapters: Adapters) -> bool:
    """No adapter at all?"""
    return await adapters.list() == []
