"""`headwater tracer` as a process."""

import asyncio
import os
from pathlib import Path
from typing import Final

from headwater.actors.runtime.actor import Actor
from headwater.actors.runtime.persistence import Ports
from headwater.ops.config.processes import TracerProcess
from headwater.ops.config.setting import ConfigError
from headwater.ops.config.trace import receiver_of
from headwater.ops.process.actor import Host, run_one
from headwater.ops.tracing.otlp import OtlpSender, need_opentelemetry
from headwater.ops.tracing.tracer import Tracer

NICENESS: Final = 10
"""By how much the process lowers its priority: what serves requests goes first, and the logs keep what waits."""


async def run(settings: TracerProcess, stop: asyncio.Event) -> int:
    """Run the tracer until stopped. Raises `ConfigError`."""
    own, name = settings.trace, settings.name or "tracer"
    if not own.otlp:
        raise ConfigError("give the URL of the receiver with --otlp")
    need_opentelemetry()
    receiver, folder = receiver_of(own.otlp), Path(settings.data_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--data-dir {folder} cannot be used: {error.strerror or error}") from error
    os.nice(NICENESS)

    async def make(ports: Ports) -> Actor:
        return Tracer(ports, name, own, OtlpSender(receiver, ports.ns), folder / f"{name}.json")

    return await run_one(Host(settings.nats, settings.metrics), "tracer", name, make, stop)
