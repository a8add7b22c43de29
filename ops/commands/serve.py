"""Commands that run the processes of a fleet, or a whole fleet on this machine."""

import sys
import tempfile
from typing import Annotated

from msgspec import Meta

from headwater.ops.config.command import command
from headwater.ops.config.engine import checked
from headwater.ops.config.picker import PICKER_PORT
from headwater.ops.config.processes import (
    AdminProcess,
    ConsoleProcess,
    EdgeProcess,
    EngineProcess,
    LocalFleetSettings,
    PickerProcess,
    RouterProcess,
    ShadowProcess,
    TracerProcess,
)
from headwater.ops.config.setting import Flag
from headwater.router.decision.names import PolicyName


@command
def up(settings: LocalFleetSettings) -> int:
    """Start a whole fleet on this machine: NATS server, router, edge and workers. The engine's own arguments follow after `--`."""
    from headwater.ops.commands import application
    from headwater.ops.process import signals
    from headwater.ops.start import environment
    from headwater.ops.start import up as fleet

    settings = checked(settings)
    environment.enter_for(settings, sys.argv[1:], per_worker=False)
    spawner = fleet.start_spawner(application.main)
    return signals.run(lambda stop: fleet.up(fleet.plan_of(settings), stop, spawner))


@command(defaults={"data_dir": "", "nats.port": 0, "http.port": 0, "log.level": "warning"})
def demo(settings: LocalFleetSettings) -> int:
    """Start a fleet, ask three questions, show where they were routed and why.

    It has its own NATS server, ports and data folder, so that it does not affect a running fleet.
    """
    from headwater.ops.process import signals
    from headwater.ops.start import demo as demonstration
    from headwater.ops.start import environment

    settings = checked(settings)
    if not settings.data_dir:
        settings = settings._replace(data_dir=tempfile.mkdtemp(prefix="headwater-demo-"))
    environment.enter_for(settings, sys.argv[1:], per_worker=False)
    return signals.run(lambda stop: demonstration.demo(settings, stop))


@command
def edge(settings: EdgeProcess) -> int:
    """Run one edge: an OpenAI-compatible HTTP endpoint."""
    from headwater.ops.process import edge as process
    from headwater.ops.process import signals

    return signals.run(lambda stop: process.run_edge(settings, stop))


@command
def router(settings: RouterProcess) -> int:
    """Run one router. Without --pool it waits for the first model card."""
    from headwater.ops.process import router as process_router
    from headwater.ops.process import signals

    return signals.run(lambda stop: process_router.run_router(settings, stop))


@command
def engine(
    engine_name: Annotated[
        str | None,
        Flag("ENGINE"),
        Meta(description="the same as --engine; the engine's own arguments may follow after `--`"),
    ] = None,
    /,
    *,
    settings: EngineProcess,
) -> int:
    """Run engine workers."""
    from headwater.ops.start import start

    return start.run(checked(settings))


@command
def admin(settings: AdminProcess) -> int:
    """Run the admin port: control of workers over HTTP."""
    from headwater.ops.process import admin as process
    from headwater.ops.process import signals

    return signals.run(lambda stop: process.admin(settings, stop))


@command
def console(settings: ConsoleProcess) -> int:
    """Run the console: a page that shows a fleet, its requests and its decisions at any position of its log."""
    from headwater.ops.console import process
    from headwater.ops.process import signals

    return signals.run(lambda stop: process.console(settings, stop))


@command
def tracer(settings: TracerProcess) -> int:
    """Send traces of requests to an OpenTelemetry receiver (--otlp), from the logs and apart from everything that serves requests."""
    from headwater.ops.process import signals
    from headwater.ops.tracing import process

    return signals.run(lambda stop: process.run(settings, stop))


@command(defaults={"picker.port": PICKER_PORT})
def picker(settings: PickerProcess) -> int:
    """Run an endpoint picker: gateways ask it over Envoy's ext_proc which endpoint serves a request, and a router decides."""
    from headwater.ops.process import picker as process
    from headwater.ops.process import signals

    return signals.run(lambda stop: process.run_picker(settings, stop))


@command
def shadow(
    settings: ShadowProcess,
    *,
    policy: Annotated[PolicyName, Meta(description="policy whose choices are recorded")],
    judge: Annotated[PolicyName, Meta(description="policy whose costs rate the choices")] = "kv",
) -> int:
    """Run another routing policy in the shadow of a pool's routers, and record what it would have chosen."""
    from headwater.ops.process import router as process_router
    from headwater.ops.process import signals

    return signals.run(lambda stop: process_router.run_shadow(settings, policy, judge, stop))
