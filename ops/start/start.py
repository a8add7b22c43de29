"""Ways to run an engine process: one worker, several that share an import, or a follower of a leader elsewhere."""

import sys
from pathlib import Path

from headwater.engines import logs, process, registry
from headwater.ops.config.processes import EngineProcess
from headwater.ops.config.setting import ConfigError
from headwater.ops.config.worker import FleetSettings
from headwater.ops.model_download.source import with_folder
from headwater.ops.process import metrics_folder


def run(settings: EngineProcess) -> int:
    """Run until stopped; returns the exit code. Raises `EngineUnavailable` for what a user can fix.

    0 after `headwater ctl stop` only: a worker that a signal ended is to be started again.
    """
    logs.describe(kind="worker")
    if settings.worker.engine == "sglang":
        from headwater.ops.start import environment

        environment.enter("sglang", sys.argv[1:], settings.engines.sglang.python)
    settings = with_folder(settings)
    if registry.traits_of(settings.worker.engine).writes_metric_files and settings.metrics.port:
        # Before the first import of Prometheus: see there.
        metrics_folder.take()
    try:
        return _run(settings)
    finally:
        process.give_up_own()


def _run(settings: EngineProcess) -> int:
    from headwater.engines.sglang import config as sglang_arguments
    from headwater.engines.vllm import config
    from headwater.ops.process import signals
    from headwater.ops.start import engine, make_engine, plan, preflight

    is_vllm = settings.worker.engine == "vllm"
    if is_vllm and config.is_follower(settings.engines.vllm.native):
        return _headless(settings)
    if settings.worker.engine == "sglang" and sglang_arguments.is_follower(settings.engines.sglang.native):
        return _sglang_follower(settings)
    if is_vllm and make_engine.on_cpu():
        from headwater.ops.start import vllm_forks

        return vllm_forks.run(settings)
    plans = plan.plan(_one(settings))
    preflight.check(settings, plans)
    alone = plan.of_worker(settings, plans[0]._replace(name=settings.name))
    return signals.run(lambda stop: engine.run_engine(alone, stop), reports_signal=True)


def _headless(settings: EngineProcess) -> int:
    """Run the data-parallel ranks of a leader on another machine."""
    from headwater.engines.vllm import config as vllm_config
    from headwater.engines.vllm import forkserver, launch
    from headwater.ops.start import make_engine

    ranks = (
        vllm_config.value(settings.engines.vllm.native, f"data_parallel_{which}")
        for which in ("rank", "start_rank")
    )
    alone, name, folder = _without_lease(settings, "headless", next((rank for rank in ranks if rank), "0"))
    if make_engine.on_cpu():
        forkserver.preload(online=any(source.startswith("hf://") for source in settings.lora.sources))
    launch.run(make_engine.vllm_settings(alone, name, folder=folder, name=folder.name))
    return 0


def _sglang_follower(settings: EngineProcess) -> int:
    """Run a further node of an engine whose first node is a worker elsewhere."""
    from headwater.engines.sglang import follower
    from headwater.ops.start import make_engine

    alone, name, folder = _without_lease(settings, "follower", "0")
    follower.run(make_engine.sglang_settings(alone, name, folder=folder, name=folder.name))
    return 0


def _without_lease(settings: EngineProcess, name: str, rank: str) -> tuple[EngineProcess, str, Path]:
    """Prepare a process that is a part of a worker elsewhere: return its settings, name and model folder, and serve its metrics."""
    from headwater.ops.process import metrics
    from headwater.ops.start import make_engine, plan, preflight

    plans = plan.plan(_one(settings))
    preflight.check(settings, plans)
    folder = make_engine.model_folder(settings.worker.model)
    name = settings.name or name
    if settings.metrics.port:
        labels = {"worker": name, "pool": "", "role": settings.worker.role, "rank": rank}
        metrics.serve(settings.metrics, lambda: labels, kind="worker")
    return plan.of_worker(settings, plans[0]), name, folder


def _one(settings: EngineProcess) -> EngineProcess:
    """The same settings for a single worker: without a shared import each worker is a process of its own."""
    fleet = settings.fleet
    if (fleet.workers or 1) > 1 or fleet.prefill_workers or fleet.decode_workers or fleet.encode_workers:
        raise ConfigError(
            f"this runs one {settings.worker.engine} worker per process: give --role and start one process per worker, "
            "or use `headwater up`"
        )
    return settings._replace(fleet=FleetSettings(workers=1))
