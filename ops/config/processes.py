"""All settings in sections, and the sections that each process and each command that reads a log uses.

A command takes the sections that it uses: parameters, or fields of a `NamedTuple`, of the same name and type.
"""

import difflib
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar, get_type_hints

from msgspec import Meta

from headwater.actors.edge.settings import AccessSettings, EdgeSettings
from headwater.actors.limits import DRAIN_TIMEOUT_S
from headwater.actors.worker.settings import HealthSettings
from headwater.engines import registry
from headwater.engines.traits import COMMON
from headwater.ops.config.sections import (
    AdminSettings,
    ConsoleSettings,
    HttpSettings,
    MediaSettings,
    MediaTransferSettings,
    NatsSettings,
    PickerSettings,
    RouterSettings,
    StreamSettings,
    TraceSettings,
)
from headwater.ops.config.setting import (
    ConfigError,
    Flag,
    Prefix,
    Setting,
    base_of,
    description_of,
    is_section,
    marker,
    setting_of,
    settings_of,
    value_at,
    with_values,
)
from headwater.ops.config.worker import (
    JOINING,
    WITH_OPTIONS,
    EngineOptions,
    FleetSettings,
    LoraOptions,
    WorkerSettings,
    section_of,
)
from headwater.router.queue import BusyLimits, QueueLimits

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "text", "json"]

Port = Annotated[int, Meta(ge=0, le=65535)]


class LogSettings(NamedTuple):
    """Logging."""

    level: Annotated[LogLevel, Meta(description="minimum level of log messages")] = "info"
    format: Annotated[LogFormat, Meta(description="text, json, or auto: text on a terminal, else json")] = (
        "auto"
    )


class MetricsSettings(NamedTuple):
    """Prometheus metrics, and the probes of a process."""

    host: Annotated[str, Meta(description="address that metrics are served on")] = "127.0.0.1"
    port: Annotated[
        int,
        Meta(
            ge=0,
            le=65535,
            description="port of a process's Prometheus metrics, and of /live and /health; 0: none. With `up` and `demo` the first of one port per "
            "process (default: free ones, listed in prometheus-targets.json in the data directory)",
        ),
    ] = 0
    live_timeout_s: float = 15.0
    """Seconds without a turn of the event loop after which /live fails."""


class ProcessCounts(NamedTuple):
    """How many processes of a kind `up` starts on this machine."""

    edges: Annotated[
        int, Meta(ge=1, le=64, description="number of edges, which share the port (--share-port)")
    ] = 1
    routers: Annotated[
        int, Meta(ge=1, le=64, description="number of routers of the pool, which share its queries")
    ] = 1


# All settings of all commands, in sections: the keys of a configuration file.

Name = Annotated[str, Meta(description="name of this process (default: generated)")]
Pool = Annotated[str, Meta(description="pool of workers (default: the only one)")]
DataDir = Annotated[str, Meta(description="folder for the log and everything else that survives a restart")]
ForModel = Annotated[
    str,
    Meta(
        description="serve the pool of this model, by the name that clients use, once a worker of it has joined (default: the "
        "pool of the first worker that does)"
    ),
]
CapturePath = Annotated[
    str,
    Flag("file"),
    Meta(description="read this file of `headwater capture` in place of the fleet's log"),
]
CacheDir = Annotated[
    str,
    Meta(
        description="folder where routers keep their newest snapshot and workers their adapters; `none`: nowhere "
        "(default: headwater in the user's cache folder)"
    ),
]
DrainTimeout = Annotated[
    float,
    Meta(
        ge=0, description="seconds that in-flight requests have to finish on stop; then they migrate or fail"
    ),
]


class Settings(NamedTuple):
    """Every setting, in the order in which help lists the sections."""

    name: Name = ""
    pool: Pool = ""
    for_model: ForModel = ""
    capture: CapturePath = ""
    data_dir: DataDir = "headwater-data"
    cache_dir: CacheDir = ""
    drain_timeout: DrainTimeout = DRAIN_TIMEOUT_S
    fleet: Annotated[FleetSettings, Prefix("")] = FleetSettings()
    processes: Annotated[ProcessCounts, Prefix("")] = ProcessCounts()
    worker: Annotated[WorkerSettings, Prefix("")] = WorkerSettings()
    engines: Annotated[EngineOptions, Prefix(inline=True)] = EngineOptions()
    lora: LoraOptions = LoraOptions()
    health: Annotated[
        HealthSettings, Meta(description="when an engine counts as dead, where it differs from the defaults")
    ] = HealthSettings()
    router: Annotated[
        RouterSettings, Prefix("", flags={"temperature": "router-temperature", "weights": "routing-weights"})
    ] = RouterSettings()
    busy: Annotated[
        BusyLimits, Meta(description="when a worker is saturated, where it differs from the defaults")
    ] = BusyLimits()
    queue: Annotated[
        QueueLimits, Meta(description="limits and order of a router's queue that differ from their defaults")
    ] = QueueLimits()
    http: Annotated[HttpSettings, Prefix("")] = HttpSettings()
    edge: Annotated[EdgeSettings, Prefix("", flags={"history": "responses"})] = EdgeSettings()
    media: MediaSettings = MediaSettings()
    media_transfer: Annotated[
        MediaTransferSettings, Prefix("media-transfer", flags={"transport": "media-transfer"})
    ] = MediaTransferSettings()
    auth: Annotated[AccessSettings, Prefix("", flags={"mode": "auth"})] = AccessSettings()
    admin: AdminSettings = AdminSettings()
    console: ConsoleSettings = ConsoleSettings()
    picker: PickerSettings = PickerSettings()
    trace: Annotated[
        TraceSettings,
        Prefix("trace", flags={"otlp": "otlp", "slow_s": "trace-slow"}),
    ] = TraceSettings()
    nats: NatsSettings = NatsSettings()
    streams: Annotated[StreamSettings, Prefix("")] = StreamSettings()
    metrics: MetricsSettings = MetricsSettings()
    log: LogSettings = LogSettings()


DEFAULTS = Settings()

Process = TypeVar("Process", bound=NamedTuple)

GROUPS = {
    "": "Process",
    "fleet": "Fleet",
    "processes": "Fleet",
    "worker": "Model and worker",
    **{section: traits.title or section for section, traits in WITH_OPTIONS.items()},
    "lora": "LoRA adapters",
    "health": "Health checks",
    "router": "Routing",
    "busy": "Admission control",
    "queue": "Admission control",
    "http": "HTTP",
    "edge": "Requests",
    "media": "Media",
    "media_transfer": "Media",
    "auth": "Authentication",
    "admin": "Admin port",
    "console": "Console",
    "picker": "Endpoint picker",
    "trace": "Traces",
    "nats": "NATS",
    "streams": "Streams",
    "metrics": "Metrics",
    "log": "Logging",
}
"""Titles of the groups in help, in order."""

SECTION_TYPES: dict[str, Any] = get_type_hints(Settings, include_extras=True)


@cache
def settings_below(name: str) -> tuple[Setting, ...]:
    """The settings of one field of `Settings`: of a section, or the one that it is itself."""
    kind = SECTION_TYPES[name]
    default = getattr(DEFAULTS, name)
    if not is_section(base_of(kind)) or description_of(kind):
        setting = setting_of(
            name, kind, default, key="", group=GROUPS.get(name, GROUPS[""]), how=Prefix(), path=(name,)
        )
        return (setting,)
    how = marker(kind, Prefix) or Prefix(name)
    key, group = ("", "") if how.inline else (name, GROUPS[name])
    return tuple(settings_of(base_of(kind), default, key=key, group=group, how=how, path=(name,)))


@cache
def all_settings() -> dict[str, Setting]:
    """Every setting by key. Raises `ConfigError` if an engine of another package has an option that is another setting's."""
    by_key: dict[str, Setting] = {}
    flags: dict[str, str] = {}
    for setting in (setting for name in SECTION_TYPES for setting in settings_below(name)):
        if setting.key in by_key or setting.flag in flags:
            raise ConfigError(
                f"an installed engine has an option with the key {setting.key} and the flag {setting.flag}, which {flags.get(setting.flag, setting.key)} "
                "has too: rename the engine or its option, or uninstall its package"
            )
        by_key[setting.key] = setting
        flags[setting.flag] = setting.key
    return by_key


def setting(key: str) -> Setting:
    """The setting of this key."""
    return all_settings()[key]


def nearest_key(key: str) -> str:
    """The known key, or name in a table, that an unknown one most likely stands for, "" if there is none.

    A flag's name, as files had it before, stands for its setting.
    """
    settings = all_settings()
    name = key.rpartition(".")[2]
    flags = {setting.flag[2:].replace("-", "_"): setting.key for setting in settings.values()}
    if key.replace("-", "_") in flags:
        return flags[key.replace("-", "_")]
    if name in flags and name != key:
        return flags[name]
    below = [f"{table}.{field}" for table, setting in settings.items() for field in setting.fields]
    names = {entry.rpartition(".")[2]: entry for entry in (*below, *settings)}
    near = difflib.get_close_matches(key, [*settings, *below], n=1, cutoff=0.7)
    if not near:
        near = [names[entry] for entry in difflib.get_close_matches(name, names, n=1, cutoff=0.7)]
    return near[0] if near else ""


def words_of(name: str, value: Any) -> list[str]:
    """A field of `Settings` on a command line: what differs from the defaults."""
    return [
        word
        for setting in settings_below(name)
        if (setting_value := value_at(value, setting.path[1:])) != setting.default
        for word in setting.words(setting_value)
    ]


def process_words(settings: NamedTuple) -> list[str]:
    """Settings of a process, a `NamedTuple` of fields of `Settings`, on its command line: what differs from the defaults."""
    return [word for name in settings._fields for word in words_of(name, getattr(settings, name))]


def with_settings(base: Process, values: Mapping[str, Any]) -> Process:
    """Settings of a process with other values, by key."""
    changed: Process = with_values(base, {setting(key).path: value for key, value in values.items()})
    return changed


def engine_options(settings: Any, engine: str) -> Any:
    """The options of an engine: those of its section with the common ones that it has, or `worker.engine_options` if it has no section."""
    section = section_of(engine)
    if section not in WITH_OPTIONS:
        return settings.worker.engine_options
    options = getattr(settings.engines, section)
    return options._replace(**{name: getattr(settings.worker, name) for name in common_options(engine)})


def common_options(engine: str) -> list[str]:
    """The settings of workers that an engine uses, of those that not all do."""
    section = section_of(engine)
    return [
        name for name in COMMON if section in WITH_OPTIONS and hasattr(WITH_OPTIONS[section].options, name)
    ]


def with_own_common(worker: WorkerSettings, engine: str) -> WorkerSettings:
    """The settings of workers of one engine, without those that only others of the fleet use."""
    refusals, defaults = registry.traits_of(engine).refusals, WorkerSettings._field_defaults
    unused = {name: defaults[name] for name in COMMON if name not in common_options(engine)}
    allowed = {"allow": tuple(word for word in worker.allow if word in refusals)}
    return worker._replace(**(allowed | unused))


def with_engine_options(settings: Process, engine: str, options: Any) -> Process:
    """The same settings with other options of an engine, if it has a section."""
    section = section_of(engine)
    if section not in WITH_OPTIONS:
        return settings
    base: Any = settings
    defaults = WITH_OPTIONS[section].options._field_defaults
    own_options = options._replace(**{name: defaults[name] for name in common_options(engine)})
    changed: Process = base._replace(engines=base.engines._replace(**{section: own_options}))
    return changed


def added_engines(fleet: FleetSettings) -> dict[str, int]:
    """How many workers of other engines a fleet has beside those of `--engine`, by engine."""
    counts = {name: getattr(fleet.added, field) for field, name in JOINING.items()}
    return {name: count for name, count in counts.items() if count}


# The settings of each process, and of the commands that read a log.


class EdgeProcess(NamedTuple):
    """One edge."""

    name: Name = DEFAULTS.name
    drain_timeout: DrainTimeout = DEFAULTS.drain_timeout
    http: HttpSettings = DEFAULTS.http
    edge: EdgeSettings = DEFAULTS.edge
    media: MediaSettings = DEFAULTS.media
    media_transfer: MediaTransferSettings = DEFAULTS.media_transfer
    auth: AccessSettings = DEFAULTS.auth
    nats: NatsSettings = DEFAULTS.nats
    streams: StreamSettings = DEFAULTS.streams
    metrics: MetricsSettings = DEFAULTS.metrics
    log: LogSettings = DEFAULTS.log


class RouterProcess(NamedTuple):
    """One router."""

    name: Name = DEFAULTS.name
    pool: Pool = DEFAULTS.pool
    for_model: ForModel = DEFAULTS.for_model
    cache_dir: CacheDir = DEFAULTS.cache_dir
    router: RouterSettings = DEFAULTS.router
    busy: BusyLimits = DEFAULTS.busy
    queue: QueueLimits = DEFAULTS.queue
    nats: NatsSettings = DEFAULTS.nats
    streams: StreamSettings = DEFAULTS.streams
    metrics: MetricsSettings = DEFAULTS.metrics
    log: LogSettings = DEFAULTS.log


class ShadowProcess(NamedTuple):
    """One shadow router."""

    name: Name = DEFAULTS.name
    pool: Pool = DEFAULTS.pool
    cache_dir: CacheDir = DEFAULTS.cache_dir
    nats: NatsSettings = DEFAULTS.nats
    metrics: MetricsSettings = DEFAULTS.metrics
    log: LogSettings = DEFAULTS.log


class EngineProcess(NamedTuple):
    """One worker, or several that share the import of their engine."""

    name: Name = DEFAULTS.name
    cache_dir: CacheDir = DEFAULTS.cache_dir
    drain_timeout: DrainTimeout = DEFAULTS.drain_timeout
    fleet: FleetSettings = DEFAULTS.fleet
    worker: WorkerSettings = DEFAULTS.worker
    media_transfer: MediaTransferSettings = DEFAULTS.media_transfer
    engines: EngineOptions = DEFAULTS.engines
    lora: LoraOptions = DEFAULTS.lora
    health: HealthSettings = DEFAULTS.health
    trace: TraceSettings = DEFAULTS.trace
    nats: NatsSettings = DEFAULTS.nats
    streams: StreamSettings = DEFAULTS.streams
    metrics: MetricsSettings = DEFAULTS.metrics
    log: LogSettings = DEFAULTS.log


class AdminProcess(NamedTuple):
    """The admin port."""

    name: Name = DEFAULTS.name
    admin: AdminSettings = DEFAULTS.admin
    nats: NatsSettings = DEFAULTS.nats
    log: LogSettings = DEFAULTS.log


class ConsoleProcess(NamedTuple):
    """The console."""

    name: Name = DEFAULTS.name
    console: ConsoleSettings = DEFAULTS.console
    auth: AccessSettings = DEFAULTS.auth
    nats: NatsSettings = DEFAULTS.nats
    log: LogSettings = DEFAULTS.log


class TracerProcess(NamedTuple):
    """The tracer."""

    name: Name = DEFAULTS.name
    data_dir: DataDir = DEFAULTS.data_dir
    trace: TraceSettings = DEFAULTS.trace
    nats: NatsSettings = DEFAULTS.nats
    metrics: MetricsSettings = DEFAULTS.metrics
    log: LogSettings = DEFAULTS.log


class PickerProcess(NamedTuple):
    """One endpoint picker."""

    name: Name = DEFAULTS.name
    drain_timeout: DrainTimeout = DEFAULTS.drain_timeout
    picker: PickerSettings = DEFAULTS.picker
    auth: AccessSettings = DEFAULTS.auth
    nats: NatsSettings = DEFAULTS.nats
    metrics: MetricsSettings = DEFAULTS.metrics
    log: LogSettings = DEFAULTS.log


class LocalFleetSettings(NamedTuple):
    """All processes of one machine: `up` and `demo`."""

    name: Name = DEFAULTS.name
    data_dir: DataDir = DEFAULTS.data_dir
    cache_dir: CacheDir = DEFAULTS.cache_dir
    drain_timeout: DrainTimeout = DEFAULTS.drain_timeout
    fleet: FleetSettings = DEFAULTS.fleet
    processes: ProcessCounts = DEFAULTS.processes
    worker: WorkerSettings = DEFAULTS.worker
    engines: EngineOptions = DEFAULTS.engines
    lora: LoraOptions = DEFAULTS.lora
    health: HealthSettings = DEFAULTS.health
    router: RouterSettings = DEFAULTS.router
    busy: BusyLimits = DEFAULTS.busy
    queue: QueueLimits = DEFAULTS.queue
    http: HttpSettings = DEFAULTS.http
    edge: EdgeSettings = DEFAULTS.edge
    media: MediaSettings = DEFAULTS.media
    media_transfer: MediaTransferSettings = DEFAULTS.media_transfer
    auth: AccessSettings = DEFAULTS.auth
    admin: AdminSettings = DEFAULTS.admin
    console: ConsoleSettings = DEFAULTS.console
    picker: PickerSettings = DEFAULTS.picker
    trace: TraceSettings = DEFAULTS.trace
    nats: NatsSettings = DEFAULTS.nats
    streams: StreamSettings = DEFAULTS.streams
    metrics: MetricsSettings = DEFAULTS.metrics
    log: LogSettings = DEFAULTS.log

    def for_process(self, kind: type[Process], name: str = "") -> Process:
        """The settings of a process of the fleet, with this name."""
        make: Any = kind
        own = {field: getattr(self, field) for field in kind._fields if hasattr(self, field)}
        made: Process = make(**(own | {"name": name}))
        return made


class ClientSettings(NamedTuple):
    """A command that connects to NATS."""

    nats: NatsSettings = DEFAULTS.nats
    log: LogSettings = DEFAULTS.log


class _PoolReader(NamedTuple):
    pool: Pool = DEFAULTS.pool
    capture: CapturePath = DEFAULTS.capture
    nats: NatsSettings = DEFAULTS.nats
    log: LogSettings = DEFAULTS.log


class PoolReader(_PoolReader):
    """A command that reads the log of a pool, or a capture of it, which its `nats` then names."""

    def __new__(
        cls,
        pool: str = DEFAULTS.pool,
        capture: str = DEFAULTS.capture,
        nats: NatsSettings = DEFAULTS.nats,
        log: LogSettings = DEFAULTS.log,
    ) -> Self:
        """Settings whose `nats` names the capture, so that those who read need to know nothing else."""
        return super().__new__(cls, pool, capture, nats._replace(capture=capture), log)


class StreamOperator(NamedTuple):
    """A command that creates or compares streams."""

    nats: NatsSettings = DEFAULTS.nats
    streams: StreamSettings = DEFAULTS.streams
    log: LogSettings = DEFAULTS.log


class PoolCommand(NamedTuple):
    """A command about one pool."""

    pool: Pool = DEFAULTS.pool
    nats: NatsSettings = DEFAULTS.nats
    log: LogSettings = DEFAULTS.log


class PoolOperator(NamedTuple):
    """A command that creates the logs of pools."""

    pool: Pool = DEFAULTS.pool
    nats: NatsSettings = DEFAULTS.nats
    streams: StreamSettings = DEFAULTS.streams
    metrics: MetricsSettings = DEFAULTS.metrics
    log: LogSettings = DEFAULTS.log
