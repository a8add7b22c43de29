"""How workers of SGLang are planned, checked and made (see `EngineLauncher`), and the nodes of an engine other than the first.

Such a node computes its part of the model, and is no worker: the first one represents all of them in the fleet. Without `follow` SGLang
would keep the process busy with an HTTP server, and ignore SIGTERM.
"""

import contextlib
import multiprocessing
import os
import time
from typing import Any, Final

from headwater.engines import kv_socket
from headwater.engines import process as engine_process
from headwater.engines.engine import Engine, EngineDied
from headwater.engines.launcher import EngineLauncher, EngineSettings, Follower, WorkerSpec
from headwater.engines.model_files import ModelFiles
from headwater.engines.native_arguments import has, number, value
from headwater.engines.process import interruptible
from headwater.engines.sglang import SglangOptions, config
from headwater.engines.sglang.config import SglangSettings, keyword_arguments
from headwater.schemas.events import Role
from headwater.schemas.names import host_port

BLOCK: Final = "SGLANG_BLOCK_NONZERO_RANK_CHILDREN"
POLL_S: Final = 0.2


class SglangLauncher(EngineLauncher[SglangOptions]):
    """See `EngineLauncher`."""

    releases = config.RELEASES

    def gpus(self) -> int:
        """See `EngineLauncher.gpus`."""
        words = self.options.native
        parts = number(words, "tensor_parallel_size", 1) * number(words, "pipeline_parallel_size", 1)
        # With it the ranks share the GPUs of the tensor-parallel parts.
        shared = has(words, "enable_dp_attention")
        needed = parts * (1 if shared else number(words, "data_parallel_size", 1))
        # A worker that spans hosts has its share of them on each.
        return self.options.gpus_per_worker or max(1, needed // number(words, "nnodes", 1))

    def known_block_size(self, worker: WorkerSpec) -> int:
        """See `EngineLauncher.known_block_size`: what it takes on a CPU is known once it runs there."""
        return worker.block_size or number(self.options.native, "page_size", 0)

    def side_ports(self, role: Role) -> int:
        """See `EngineLauncher.side_ports`: a prefill worker's bootstrap server, which finds a free port itself unless one is given."""
        return int(role == "prefill" and self.options.handoff_port > 0)

    def is_met(self, role: Role) -> bool:
        """See `EngineLauncher.is_met`: at a prefill worker's bootstrap server, and by NIXL."""
        return role in ("prefill", "decode")

    def follower(self) -> Follower | None:
        """See `EngineLauncher.follower`."""
        if number(self.options.native, "node_rank", 0) == 0:
            return None
        leader = value(self.options.native, "dist_init_addr") or ""
        return Follower("follower", leader=leader, ends_with_it=True)

    def node_arguments(self, nodes: int, rank: int, leader: str, port: int) -> list[str]:
        """See `EngineLauncher.node_arguments`."""
        return [
            "--nnodes",
            str(nodes),
            "--node-rank",
            str(rank),
            "--dist-init-addr",
            host_port(leader, port),
        ]

    def run_follower(self, worker: WorkerSpec) -> None:
        """See `EngineLauncher.run_follower`."""
        follow(EngineSettings(worker, self.options, self.read_files(worker)))

    def make(self, worker: WorkerSpec, files: ModelFiles) -> Engine:
        """See `EngineLauncher.make`."""
        settings = EngineSettings(worker, self.options, files)
        if worker.role == "encode":
            from headwater.engines.sglang.encoder import SglangEncoder

            return SglangEncoder(settings)
        from headwater.engines.sglang.engine import SglangEngine

        return SglangEngine(settings)


def follow(settings: SglangSettings) -> None:
    """Run a node other than the first until that stops. Raises `EngineUnavailable`, `EngineDied` with the cause, and `EngineInterrupted` after a signal."""
    from headwater.engines.sglang.process import import_sglang, launch

    cpu = import_sglang()
    native_options = config.parse(settings.options.native)
    folder = engine_process.take("engine")
    failure = engine_process.prepare(folder)
    # Else the constructor returns when the schedulers have ended.
    os.environ[BLOCK] = "0"
    try:
        with interruptible():
            launch(
                keyword_arguments(settings, native_options, *kv_socket.in_folder(folder), cpu=cpu), failure
            )
            _watch(multiprocessing.active_children(), failure)
    finally:
        # Those of this process only: the first node notices that its peer is gone.
        for process in multiprocessing.active_children():
            process.kill()
            process.join()
        engine_process.give_up(folder)


def _watch(processes: list[Any], failure: str) -> None:
    """Return when all have ended, as they do when the first node stops. Raises `EngineDied`."""
    while any(process.is_alive() for process in processes):
        if cause := engine_process.read(failure, processes):
            raise EngineDied(f"SGLang died: {cause}")
        with contextlib.suppress(InterruptedError):
            time.sleep(POLL_S)
    if cause := engine_process.read(failure, processes):
        raise EngineDied(f"SGLang died: {cause}")
