"""`headwater up`: a whole fleet as supervised processes of this machine (see `ops.start.machine`).

`temporary_fleet` is one of simulated engines, on a server, ports and a folder of its own, which ends with its block: for benchmarks and
replays. `headwater demo` asks a fleet three questions, and shows where they went and why.
"""

import asyncio
import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, Protocol

import msgspec
import structlog

from headwater.actors.runtime.actor import cancel_all
from headwater.engines import logs
from headwater.engines.process import EngineInterrupted
from headwater.events.jetstream import without_secret
from headwater.events.ports import LogError
from headwater.ops.config.processes import (
    AdminProcess,
    ConsoleProcess,
    EdgeProcess,
    EngineProcess,
    LocalFleetSettings,
    PickerProcess,
    RouterProcess,
    TracerProcess,
    with_settings,
)
from headwater.ops.config.sections import NatsSettings
from headwater.ops.config.setting import ConfigError
from headwater.ops.history.explanation import describe
from headwater.ops.nats.connect import choose_pool, operator_ports
from headwater.ops.operator import explain, log
from headwater.ops.start import plan
from headwater.ops.start.machine import Machine, MachinePlan, ServerPlan
from headwater.ops.start.spawner import Main, Spawner
from headwater.schemas.names import split_host_port
from headwater.schemas.tables import ModelCard

TRACER: Final = "tracer-0"
PICKER: Final = "picker-0"

_log = structlog.get_logger("headwater.up")


def plan_of(settings: LocalFleetSettings) -> MachinePlan:
    """The processes of a whole fleet on this machine. Raises `ConfigError`."""
    nats, streams = settings.nats, settings.streams
    if streams.replicas > 1 and not nats.url:
        raise ConfigError(
            f"--replicas {streams.replicas} needs a cluster of NATS servers: give its URL with --nats"
        )
    exact = nats.port not in (0, NatsSettings().port)
    counts = settings.processes
    return MachinePlan(
        settings.data_dir,
        settings.drain_timeout,
        nats,
        streams,
        settings.metrics,
        settings.log,
        server=None if nats.url else ServerPlan(nats.port, exact_port=exact),
        edges=tuple(settings.for_process(EdgeProcess, f"edge-{number}") for number in range(counts.edges)),
        routers=tuple(
            settings.for_process(RouterProcess, f"router-{number}") for number in range(counts.routers)
        ),
        engines=(settings.for_process(EngineProcess, settings.name),),
        admin=settings.for_process(AdminProcess) if settings.admin.port else None,
        console=settings.for_process(ConsoleProcess) if settings.console.port else None,
        tracer=settings.for_process(TracerProcess, TRACER) if settings.trace.otlp else None,
        picker=settings.for_process(PickerProcess, PICKER) if settings.picker.port else None,
        has_picker=bool(settings.picker.port),
    )


def example_request(card: ModelCard, key: str) -> str:
    """The path after /v1/ and further arguments of curl; `key` are those for authentication."""
    if card.speech is not None:
        return f"audio/transcriptions{key} -F model={card.name} -F file=@speech.wav"
    path = "chat/completions"
    example: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello!"}], "stream": True}
    if card.image_generation is not None:
        path, example = "images/generations", {"prompt": "a river at its source"}
    elif card.video_generation is not None:
        path, example = "videos", {"prompt": "a river at its source"}
    elif "generate" not in card.capabilities:
        path, example = "embeddings", {"input": "Hello!"}
    body = msgspec.json.encode({"model": card.name, **example}).decode()
    return f"{path} -H 'content-type: application/json'{key} -d '{body}'"


class Starter(Protocol):
    """Who started this machine's part of a fleet, and is told how far it is."""

    def tell_ready(self) -> None:
        """All processes are ready."""

    async def wait_for_others(self) -> None:
        """All processes but the NATS server have stopped: return when those of other machines have, too."""


async def up(
    machine_plan: MachinePlan,
    stop: asyncio.Event,
    spawner: Spawner | None = None,
    starter: Starter | None = None,
) -> int:
    """Run one machine's processes until stopped. Exit code 1 if a process cannot be kept alive."""
    began = time.monotonic()
    fleet = Machine(machine_plan, spawner, before_server=starter.wait_for_others if starter else None)
    waiting = asyncio.ensure_future(stop.wait())
    try:
        if logs.is_json():
            _log.info("fleet_starting", workers=plan.described(fleet.workers))
        else:
            description = plan.described(fleet.workers) or "processes without workers"
            print(f"starting {description} …", file=sys.stderr, flush=True)
        ends: set[asyncio.Future[Any]] = {waiting, fleet.failure}
        starting = asyncio.create_task(fleet.start(), name="start")
        await asyncio.wait({starting, *ends}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            ready = asyncio.create_task(fleet.ready(), name="ready")
            await asyncio.wait({ready, *ends}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                ready.result()
                await _greet(fleet, time.monotonic() - began)
                if starter is not None:
                    starter.tell_ready()
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            ready.cancel()
        await cancel_all([starting])
        if fleet.failure.done():
            logs.say(fleet.failure.result(), failed=True)
            return 1
        if logs.is_json():
            _log.info("fleet_stopping")
        else:
            print("stopping: finishing in-flight requests …", file=sys.stderr, flush=True)
        return 0
    except EngineInterrupted:
        return 0
    finally:
        waiting.cancel()
        with contextlib.suppress(LogError):
            await fleet.stop()


async def _greet(fleet: Machine, seconds: float) -> None:
    """Say that the fleet is ready, and where."""
    nats = without_secret(fleet.nats.url)
    if not fleet.url:
        # A host of a fleet whose edges are elsewhere.
        logs.say(
            f"{plan.described(fleet.workers) or 'this machine'} ready after {seconds:.1f} s (NATS {nats})"
        )
        return
    url, card = f"{fleet.url}/v1", await fleet.model()
    if logs.is_json():
        _log.info(
            "fleet_ready",
            url=url,
            model=card.name,
            nats=nats,
            console=fleet.console_url,
            seconds=round(seconds, 1),
        )
        return
    console = f"console: {fleet.console_url}\n" if fleet.console_url else ""
    key = " -H 'authorization: Bearer KEY'" if fleet.authenticates else ""
    print(
        f"headwater is ready at {url} after {seconds:.1f} s (model {card.name}, NATS {nats})\n"
        f"{console}try: curl -N {url}/{example_request(card, key)}",
        flush=True,
    )


def start_spawner(main: Main) -> Spawner:
    """Import what the fleet's processes run and fork the process that starts them. Call it before any event loop.

    `main` runs a command line.
    """
    from headwater.ops.console import process  # noqa: F401
    from headwater.ops.start import (  # noqa: F401
        actor,
        edge,
        engine,
    )

    actor.compile_kernels()
    return Spawner.fork(main)


READY_S: Final = 120.0
"""How long a fleet may take to start; a busy machine takes more than half a minute."""

_OWN: Final[Mapping[str, Any]] = {
    "worker.engine": "sim",
    "http.port": 0,
    "nats.port": 0,
    "console.port": 0,
    "log.level": "error",
}


@asynccontextmanager
async def temporary_fleet(settings: Mapping[str, Any]) -> AsyncIterator[Machine]:
    """A fleet that is ready. `settings` are those that differ from the defaults, by key. Raises `TimeoutError`."""
    folder = tempfile.mkdtemp(prefix="headwater-")
    fleet = Machine(plan_of(with_settings(LocalFleetSettings(data_dir=folder), {**_OWN, **settings})))
    try:
        await fleet.start()
        async with asyncio.timeout(READY_S):
            await fleet.ready()
        yield fleet
    finally:
        await fleet.stop()
        shutil.rmtree(folder, ignore_errors=True)


SYSTEM = (
    "You are the guide of a small museum about rivers. You answer visitors in one or two short sentences, in plain "
    "words, and you never make up facts. If you do not know something, say so. Be friendly and calm. The museum is "
    "open from nine to five, tickets are free for children, and the café is on the second floor, next to the "
    "aquarium with the trout. Visitors may take photographs without flash. Dogs have to wait outside."
)
QUESTIONS = (
    "What is the capital of France?",
    "Where does a river begin?",
    "Name one animal that lives in a river.",
)


async def demo(settings: LocalFleetSettings, stop: asyncio.Event) -> int:
    """Run the demonstration; 0 if all questions were answered and can be explained."""
    if settings.auth.mode != "none":
        raise ConfigError(
            f"--auth {settings.auth.mode}: the demo asks its questions without a key; use `headwater up`"
        )
    if settings.http.tls_cert or settings.http.tls_key:
        raise ConfigError("demo serves plain HTTP on this machine: use `headwater up` for TLS")
    began = time.monotonic()
    fleet = Machine(plan_of(settings))
    try:
        print(f"starting {len(fleet.workers)} {settings.worker.engine} workers …", flush=True)
        await fleet.start()
        ready = asyncio.ensure_future(fleet.ready())
        waiting = asyncio.ensure_future(stop.wait())
        ends: set[asyncio.Future[Any]] = {ready, waiting, fleet.failure}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not ready.done():
            ready.cancel()
            print(fleet.failure.result() if fleet.failure.done() else "stopped", file=sys.stderr)
            return 1
        ready.result()
        model = (await fleet.model()).name
        print(f"ready at {fleet.url}/v1 after {time.monotonic() - began:.1f} s, model {model}\n", flush=True)
        requests = [await _ask(fleet.url, model, question) for question in QUESTIONS]
        return await _explain(fleet.nats, requests)
    finally:
        await fleet.stop()


async def _ask(url: str, model: str, question: str) -> str:
    """Ask over HTTP, printing the answer as it comes; returns the request's id."""
    address = url.removeprefix("http://")
    body = msgspec.json.encode(
        {
            "model": model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "max_tokens": 48,
            "messages": [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": question},
            ],
        }
    )
    reader, writer = await asyncio.open_connection(*split_host_port(address))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    print(f"> {question}\n  ", end="", flush=True)
    began = time.monotonic()
    first_s = 0.0
    request = ""
    usage: dict[str, Any] = {}
    async for line in reader:
        if not line.startswith(b"data: {"):
            if line.startswith(b"HTTP/1.1") and b" 200 " not in line:
                raise RuntimeError(f"the edge answered {line.decode().strip()}")
            continue
        document: dict[str, Any] = msgspec.json.decode(line[6:])
        if "error" in document:
            raise RuntimeError(document["error"]["message"])
        request = document["id"]
        usage = document.get("usage") or usage
        for choice in document["choices"]:
            text = choice["delta"].get("content") or ""
            if text and not first_s:
                first_s = time.monotonic() - began
            print(text, end="", flush=True)
    writer.close()
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    print(
        f"\n  [{usage.get('prompt_tokens')} prompt tokens, {cached} of them cached by the engine; "
        f"first token after {first_s * 1000:.0f} ms, all after {time.monotonic() - began:.1f} s]\n",
        flush=True,
    )
    return request


async def _explain(nats: NatsSettings, requests: list[str]) -> int:
    """Why each went where it went, from the log, and what the log holds."""
    async with operator_ports(nats, "demo") as ports:
        pool = await choose_pool(ports, "")
        pool_log = await ports.pool_log(pool)
        descriptions: list[str] = []
        for request in requests:
            # Decisions are stored a few milliseconds after they were answered.
            for _ in range(100):
                decisions = await explain.decisions_for(pool_log, request)
                if decisions:
                    break
                await asyncio.sleep(0.05)
            descriptions += [
                describe(explained.decision, explained.position, explained.after, explained.engines)
                for explained in decisions
            ]
        print("why each went where it went:\n")
        print("\n\n".join(descriptions))
        print()
        print(await log.summary(ports, pool))
    return 0 if len(descriptions) >= len(requests) else 1
