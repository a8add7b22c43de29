"""`headwater up`: a whole fleet as supervised processes of this machine (see `ops.start.machine`)."""

import asyncio
import contextlib
import sys
import time
from typing import Any, Final, Protocol

import msgspec
import structlog

from headwater.actors.runtime.actor import cancel_all
from headwater.engines import logs
from headwater.engines.process import EngineInterrupted
from headwater.events.jetstream import without_secret
from headwater.events.ports import LogError
from headwater.ops.config.nats import NatsSettings
from headwater.ops.config.processes import (
    AdminProcess,
    ConsoleProcess,
    EdgeProcess,
    LocalFleetSettings,
    PickerProcess,
    RouterProcess,
    TracerProcess,
)
from headwater.ops.config.setting import ConfigError
from headwater.ops.start import plan
from headwater.ops.start.machine import Machine, MachinePlan, ServerPlan
from headwater.ops.start.spawner import Main, Spawner
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
    edge = EdgeProcess(**{name: getattr(settings, name) for name in EdgeProcess._fields})
    router = RouterProcess(
        **{name: getattr(settings, name) for name in RouterProcess._fields if hasattr(settings, name)}
    )
    picker = PickerProcess(
        name=PICKER, drain_timeout=settings.drain_timeout, picker=settings.picker, auth=settings.auth
    )
    tracer = TracerProcess(name=TRACER, data_dir=settings.data_dir, trace=settings.trace)
    exact = nats.port not in (0, NatsSettings().port)
    return MachinePlan(
        settings.data_dir,
        settings.drain_timeout,
        nats,
        streams,
        settings.metrics,
        settings.log,
        server=None if nats.url else ServerPlan(nats.port, exact_port=exact),
        edges=tuple(edge._replace(name=f"edge-{number}") for number in range(settings.processes.edges)),
        routers=tuple(
            router._replace(name=f"router-{number}") for number in range(settings.processes.routers)
        ),
        engines=(settings.engine_process,),
        admin=AdminProcess(admin=settings.admin, nats=nats) if settings.admin.port else None,
        console=ConsoleProcess(console=settings.console, auth=settings.auth)
        if settings.console.port
        else None,
        tracer=tracer if settings.trace.otlp else None,
        picker=picker if settings.picker.port else None,
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
    wanted: MachinePlan, stop: asyncio.Event, spawner: Spawner | None = None, starter: Starter | None = None
) -> int:
    """Run one machine's processes until stopped. Exit code 1 if a process cannot be kept alive."""
    began = time.monotonic()
    fleet = Machine(wanted, spawner, before_server=starter.wait_for_others if starter else None)
    waiting = asyncio.ensure_future(stop.wait())
    try:
        if logs.is_json():
            _log.info("fleet_starting", workers=plan.described(fleet.workers))
        else:
            what = plan.described(fleet.workers) or "processes without workers"
            print(f"starting {what} …", file=sys.stderr, flush=True)
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
    from headwater.ops.process import actor, edge  # noqa: F401
    from headwater.ops.start import engine  # noqa: F401

    actor.compile_kernels()
    return Spawner.fork(main)
