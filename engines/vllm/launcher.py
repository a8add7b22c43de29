"""How workers of vLLM are planned, checked and made: see `EngineLauncher`."""

from collections.abc import Iterable, Sequence

import msgspec
import structlog

from headwater.engines.engine import Engine, EngineUnavailable
from headwater.engines.launcher import EngineLauncher, EngineSettings, Follower, PortRange, WorkerSpec
from headwater.engines.model_files import ModelFiles
from headwater.engines.native_arguments import number, value
from headwater.engines.vllm import VllmOptions, config
from headwater.engines.vllm.config import CPU_BLOCK_SIZE
from headwater.schemas.events import Role
from headwater.schemas.tables import ModelCard

_log = structlog.get_logger("headwater.vllm")


class VllmLauncher(EngineLauncher[VllmOptions]):
    """See `EngineLauncher`."""

    releases = config.RELEASES

    def computes_on_cpu(self) -> bool:
        """Is vLLM's CPU build installed?"""
        return config.on_cpu()

    def gpus(self) -> int:
        """See `EngineLauncher.gpus`: all parts of the model on this host, for each rank."""
        words = self.options.native
        parts = number(words, "tensor_parallel_size", 1)
        # Context parallelism of the decode shares the GPUs of the tensor-parallel parts.
        parts *= number(words, "prefill_context_parallel_size", 1)
        needed = parts * number(words, "pipeline_parallel_size", 1) * self._ranks
        # A worker that spans hosts has its share of them on each.
        return self.options.gpus_per_worker or max(1, needed // number(words, "nnodes", 1))

    @property
    def _ranks(self) -> int:
        """Data-parallel ranks that one worker runs on this machine: each has a side channel."""
        size = number(self.options.native, "data_parallel_size", 1)
        return max(1, number(self.options.native, "data_parallel_size_local", size))

    def side_ports(self, role: Role) -> int:
        """See `EngineLauncher.side_ports`: NIXL's side channels."""
        return self._ranks if self.is_met(role) else 0

    def is_met(self, role: Role) -> bool:
        """See `EngineLauncher.is_met`: at NIXL's side channels."""
        if role == "encode":
            return False
        words = self.options.native
        if self.options.connector:
            return "nixl" in self.options.connector
        return role != "both" or "nixl" in (value(words, "kv_transfer_config") or "").lower()

    def ports(self, workers: Sequence[WorkerSpec]) -> list[PortRange]:
        """See `EngineLauncher.ports`: the sockets of native KV events."""
        flag = "--kv-events-config"
        text = value(self.options.native, "kv_events_config")
        if not text:
            return []
        try:
            events = msgspec.json.decode(text, type=dict[str, object])
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise EngineUnavailable(f"{flag} {text}: {error}. Give a JSON object") from error
        endpoints = [events.get(name) for name in ("endpoint", "replay_endpoint")]
        return [
            port
            for worker in workers
            for endpoint in endpoints
            if isinstance(endpoint, str)
            for port in config.kv_event_ports(worker.name, endpoint, self._ranks, flag)
        ]

    def check(self, workers: Sequence[WorkerSpec]) -> None:
        """See `EngineLauncher.check`."""
        super().check(workers)
        for worker in workers:
            config.role(worker.role, self.options.connector, self.options.native)

    def known_block_size(self, worker: WorkerSpec) -> int:
        """See `EngineLauncher.known_block_size`."""
        native = number(self.options.native, "block_size", 0)
        return worker.block_size or native or (CPU_BLOCK_SIZE if self.computes_on_cpu() else 0)

    def check_fleet(self, worker: WorkerSpec, model: str, cards: Iterable[ModelCard], live: set[str]) -> None:
        """See `EngineLauncher.check_fleet`: KV moves between equal versions."""
        allow = "mixed-versions" in self.options.allow
        config.versions(worker.role, config.installed(), model, cards, live, allow=allow)

    def follower(self) -> Follower | None:
        """See `EngineLauncher.follower`: the data-parallel ranks of a leader on another machine, or a further node."""
        if not config.is_follower(self.options.native):
            return None
        rank_options = (
            value(self.options.native, f"data_parallel_{which}") for which in ("rank", "start_rank")
        )
        rank = next((rank for rank in rank_options if rank), "0")
        # Ranks meet theirs while they start only.
        is_node = number(self.options.native, "node_rank", 0) > 0
        return Follower("headless", rank, config.leader(self.options.native), ends_with_it=is_node)

    def run_follower(self, worker: WorkerSpec) -> None:
        """See `EngineLauncher.run_follower`."""
        from headwater.engines.vllm import launch, preload

        if self.computes_on_cpu():
            preload.preload(online=worker.online)
        launch.run(EngineSettings(worker, self.options, self.read_files(worker)))

    def node_arguments(self, nodes: int, rank: int, leader: str, port: int) -> list[str]:
        """See `EngineLauncher.node_arguments`."""
        group = ["--nnodes", str(nodes), "--node-rank", str(rank)]
        return [*group, "--master-addr", leader, "--master-port", str(port)]

    def shares_import(self) -> bool:
        """See `EngineLauncher.shares_import`: with CUDA a fork cannot use what its parent initialised."""
        return self.computes_on_cpu()

    def import_once(self, workers: Sequence[WorkerSpec]) -> None:
        """See `EngineLauncher.import_once`."""
        from headwater.engines.vllm import preload

        _log.info("vllm_importing", workers=len(workers))
        try:
            seconds = preload.preload(online=any(worker.online for worker in workers))
        except ImportError as error:
            raise EngineUnavailable(f"vLLM cannot be imported: {error}") from error
        # Once for all, with vLLM's own parser; what it means is not needed here.
        config.parse(self.options.native)
        _log.info("vllm_imported", seconds=round(seconds, 1))

    def make(self, worker: WorkerSpec, files: ModelFiles) -> Engine:
        """See `EngineLauncher.make`."""
        settings = EngineSettings(worker, self.options, files)
        if worker.role == "encode":
            from headwater.engines.vllm.encoder import VllmEncoder

            return VllmEncoder(settings)
        from headwater.engines.vllm.engine import VllmEngine

        return VllmEngine(settings)
