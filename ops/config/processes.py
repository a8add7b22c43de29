"""The settings of each process and of the commands that read a log: the sections that it uses, and no more."""

from typing import NamedTuple

from headwater.actors.edge.access.settings import AccessSettings
from headwater.actors.worker.serving.settings import HealthSettings
from headwater.ops.config.edge import AdminSettings, EdgeSettings, HttpSettings
from headwater.ops.config.media import MediaSettings, MediaTransferSettings
from headwater.ops.config.nats import NatsSettings, StreamSettings
from headwater.ops.config.process import LogSettings, MetricsSettings
from headwater.ops.config.router import RouterSettings
from headwater.ops.config.tree import DEFAULTS, CacheDir, DataDir, DrainTimeout, Name, Pool
from headwater.ops.config.worker import (
    FleetSettings,
    LoraOptions,
    SglangOptions,
    SimOptions,
    TensorRtOptions,
    VllmOptions,
    WorkerSettings,
)
from headwater.router.queue.limits import BusyLimits, QueueLimits


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
    """One worker, or several that share the import of vLLM."""

    name: Name = DEFAULTS.name
    cache_dir: CacheDir = DEFAULTS.cache_dir
    drain_timeout: DrainTimeout = DEFAULTS.drain_timeout
    fleet: FleetSettings = DEFAULTS.fleet
    worker: WorkerSettings = DEFAULTS.worker
    media_transfer: MediaTransferSettings = DEFAULTS.media_transfer
    vllm: VllmOptions = DEFAULTS.vllm
    sglang: SglangOptions = DEFAULTS.sglang
    tensorrt_llm: TensorRtOptions = DEFAULTS.tensorrt_llm
    sim: SimOptions = DEFAULTS.sim
    lora: LoraOptions = DEFAULTS.lora
    health: HealthSettings = DEFAULTS.health
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


class LocalFleetSettings(NamedTuple):
    """All processes of one machine: `up` and `demo`."""

    name: Name = DEFAULTS.name
    data_dir: DataDir = DEFAULTS.data_dir
    cache_dir: CacheDir = DEFAULTS.cache_dir
    drain_timeout: DrainTimeout = DEFAULTS.drain_timeout
    fleet: FleetSettings = DEFAULTS.fleet
    worker: WorkerSettings = DEFAULTS.worker
    vllm: VllmOptions = DEFAULTS.vllm
    sglang: SglangOptions = DEFAULTS.sglang
    tensorrt_llm: TensorRtOptions = DEFAULTS.tensorrt_llm
    sim: SimOptions = DEFAULTS.sim
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
    nats: NatsSettings = DEFAULTS.nats
    streams: StreamSettings = DEFAULTS.streams
    metrics: MetricsSettings = DEFAULTS.metrics
    log: LogSettings = DEFAULTS.log

    @property
    def engine_process(self) -> EngineProcess:
        """The settings that the engine processes share."""
        return EngineProcess(**{name: getattr(self, name) for name in EngineProcess._fields})


class ClientSettings(NamedTuple):
    """A command that connects to NATS."""

    nats: NatsSettings = DEFAULTS.nats
    log: LogSettings = DEFAULTS.log


class PoolReader(NamedTuple):
    """A command that reads the log of a pool."""

    pool: Pool = DEFAULTS.pool
    nats: NatsSettings = DEFAULTS.nats
    log: LogSettings = DEFAULTS.log


class StreamOperator(NamedTuple):
    """A command that creates or compares streams."""

    nats: NatsSettings = DEFAULTS.nats
    streams: StreamSettings = DEFAULTS.streams
    log: LogSettings = DEFAULTS.log


class PoolOperator(NamedTuple):
    """A command that creates the logs of pools."""

    pool: Pool = DEFAULTS.pool
    nats: NatsSettings = DEFAULTS.nats
    streams: StreamSettings = DEFAULTS.streams
    log: LogSettings = DEFAULTS.log
