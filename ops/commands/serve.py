"""Commands that run the processes of a fleet, or a whole fleet on this machine, with checks across the settings of engines."""

import sys
import tempfile
from typing import Annotated, Any, Final, TypeVar

from msgspec import Meta

from headwater.engines import native_arguments, registry
from headwater.engines.traits import COMMON
from headwater.ops.config.command import Process, command
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
    added_engines,
    common_options,
    engine_options,
    setting,
    settings_below,
    with_engine_options,
)
from headwater.ops.config.sections import PICKER_PORT
from headwater.ops.config.setting import ConfigError, Flag, value_at
from headwater.ops.config.sources import NATIVE
from headwater.ops.config.worker import WITH_OPTIONS, section_of
from headwater.schemas.routing import PolicyName

HasEngine = TypeVar("HasEngine", EngineProcess, LocalFleetSettings)

REJECTED: Final[dict[str, str]] = {
    "tokenizer": "the edge has the tokenizer of --model: give a model folder with the wanted tokenizer",
    "tokenizer_path": "the edge has the tokenizer of --model: give a model folder with the wanted tokenizer",
    "tokenizer_revision": "a tokenizer is that of its model: give --model-revision",
    "download_dir": "models of a hub are in its library's cache: set HF_HUB_CACHE",
    "hf_token": "give the token in HF_TOKEN",
}
"""Arguments of an engine that the rest of the fleet would not know of, and what to do in their place."""


def checked(settings: HasEngine) -> HasEngine:
    """The settings with what an engine's own arguments say of ours. Raises `ConfigError` for a contradiction.

    An engine's file gets its absolute path: the workers' processes may have another folder.
    """
    engine, entry = settings.worker.engine, registry.find(settings.worker.engine)
    if entry.is_file:
        path = ":".join(filter(None, (entry.module, entry.attribute)))
        settings = settings._replace(worker=settings.worker._replace(engine=path))
    settings = _taken(settings, engine)
    for other in added_engines(settings.fleet):
        if other == engine:
            raise ConfigError(
                f"--{other}-workers is for fleets of another --engine: use --workers with --engine {other}"
            )
        # Their model is that of the others.
        settings = _taken(settings, other)
    _check_unused(settings)
    return settings


def _taken(settings: HasEngine, engine: str) -> HasEngine:
    """Return the settings with the shared ones that this engine's own arguments contain, and those arguments without them."""
    traits = registry.traits_of(engine)
    options = engine_options(settings, engine)
    if not hasattr(options, NATIVE):
        return settings
    worker, words = settings.worker, options.native
    for name, spellings in traits.shared_arguments.items():
        values = (native_arguments.value(words, spelling) for spelling in spellings)
        native_value, worker_value = next(filter(None, values), None), getattr(worker, name)
        if worker_value and native_value and worker_value != native_value:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{flag} {worker_value} contradicts {flag} {native_value} among the engine's own arguments: leave one out"
            )
        if native_value:
            shared: dict[str, Any] = {name: native_value}
            worker = worker._replace(**shared)
    for name, reason in REJECTED.items():
        rejected_value = native_arguments.value(words, name)
        if rejected_value == worker.model and rejected_value:
            words = native_arguments.without(words, name, takes_value=True)
        elif rejected_value is not None:
            raise ConfigError(f"--{name.replace('_', '-')} among the engine's own arguments: {reason}")
    for name in traits.kept_back:
        words = native_arguments.without(words, name, takes_value=True)
    changed = settings._replace(worker=worker)
    return with_engine_options(changed, engine, options._replace(**{NATIVE: words}))


def _check_unused(settings: HasEngine) -> None:
    engine = settings.worker.engine
    engines = (engine, *added_engines(settings.fleet))
    sections = {section_of(name) for name in engines}
    unused = [option for option in settings_below("engines") if option.path[1] not in sections]
    if section_of(engine) in WITH_OPTIONS:
        unused.append(setting("worker.engine_options"))
    users = {name: [each for each in engines if name in common_options(each)] for name in COMMON}
    unused += [setting(f"worker.{name}") for name in COMMON if not users[name]]
    for option in unused:
        if value_at(settings, option.path) != option.default:
            option_label = "engine arguments (after `--`)" if option.path[-1] == NATIVE else option.flag
            raise ConfigError(
                f"{option_label} [{option.variable}] is not used by --engine {engine}: leave it out"
            )
    if settings.worker.logits_processors and len(users["logits_processors"]) > 1:
        raise ConfigError(
            f"--logits-processors: a class is for one engine, and this fleet has workers of {' and '.join(users['logits_processors'])}: "
            "give each its own in a fleet's file (`headwater launch`), as settings.worker.logits_processors of its workers"
        )
    refusals = [word for name in engines for word in registry.traits_of(name).refusals]
    for word in settings.worker.allow:
        if word not in refusals:
            raise ConfigError(
                f"--allow {word}: --engine {engine} refuses nothing of that name; it takes {', '.join(dict.fromkeys(refusals))}"
            )


@command
def up(settings: LocalFleetSettings) -> Process:
    """Start a whole fleet on this machine: NATS server, router, edge and workers. The engine's own arguments follow after `--`."""
    from headwater.ops.commands import application
    from headwater.ops.launch import up as launch_up
    from headwater.ops.start import engine_process

    settings = checked(settings)
    engine_process.enter_for(settings, sys.argv[1:], per_worker=False)
    spawner = launch_up.start_spawner(application.main)
    return lambda stop: launch_up.up(launch_up.plan_of(settings), stop, spawner)


@command(defaults={"data_dir": "", "nats.port": 0, "http.port": 0, "log.level": "warning"})
def demo(settings: LocalFleetSettings) -> Process:
    """Start a fleet, ask three questions, show where they were routed and why.

    It has its own NATS server, ports and data folder, so that it does not affect a running fleet.
    """
    from headwater.ops.launch import up as launch_up
    from headwater.ops.start import engine_process

    settings = checked(settings)
    if not settings.data_dir:
        settings = settings._replace(data_dir=tempfile.mkdtemp(prefix="headwater-demo-"))
    engine_process.enter_for(settings, sys.argv[1:], per_worker=False)
    return lambda stop: launch_up.demo(settings, stop)


@command
def edge(settings: EdgeProcess) -> Process:
    """Run one edge: an OpenAI-compatible HTTP endpoint."""
    from headwater.ops.start import edge as edge_process

    return lambda stop: edge_process.run_edge(settings, stop)


@command
def router(settings: RouterProcess) -> Process:
    """Run one router. Without --pool it waits for the first model card."""
    from headwater.ops.start import router as router_process

    return lambda stop: router_process.run_router(settings, stop)


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
    from headwater.ops.start import engine_process

    return engine_process.run(checked(settings))


@command
def admin(settings: AdminProcess) -> Process:
    """Run the admin port: control of workers over HTTP."""
    from headwater.ops.start import admin as admin_process

    return lambda stop: admin_process.admin(settings, stop)


@command
def console(settings: ConsoleProcess) -> Process:
    """Run the console: a page that shows a fleet, its requests and its decisions at any position of its log."""
    from headwater.ops.console import process

    return lambda stop: process.console(settings, stop)


@command
def tracer(settings: TracerProcess) -> Process:
    """Send traces of requests to an OpenTelemetry receiver (--otlp), from the logs and apart from everything that serves requests."""
    from headwater.ops.tracer import run

    return lambda stop: run(settings, stop)


@command(defaults={"picker.port": PICKER_PORT})
def picker(settings: PickerProcess) -> Process:
    """Run an endpoint picker: gateways ask it over Envoy's ext_proc which endpoint serves a request, and a router decides."""
    from headwater.ops.start import edge as edge_process

    return lambda stop: edge_process.run_picker(settings, stop)


@command
def shadow(
    settings: ShadowProcess,
    *,
    policy: Annotated[PolicyName, Meta(description="policy whose choices are recorded")],
    judge: Annotated[PolicyName, Meta(description="policy whose costs rate the choices")] = "kv",
) -> Process:
    """Run another routing policy in the shadow of a pool's routers, and record what it would have chosen."""
    from headwater.ops.start import router as router_process

    return lambda stop: router_process.run_shadow(settings, policy, judge, stop)
