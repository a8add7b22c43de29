"""`headwater engine`: one worker, several that share an import, or a process that only works for a leader elsewhere."""

import msgspec

from headwater.ops import metrics_folder
from headwater.ops.config import ConfigError, Settings


def run(settings: Settings) -> int:
    """Run until stopped; returns the exit code. Raises `EngineUnavailable` for what a user can mend."""
    if settings.engine == "vllm" and settings.metrics_port:
        # Before the first import of Prometheus: see there.
        metrics_folder.take()
    try:
        return _run(settings)
    finally:
        metrics_folder.give_up_own()


def _run(settings: Settings) -> int:
    from headwater.engines.vllm import checks
    from headwater.ops import engines, preflight, process, run_engine, workers

    if settings.engine == "vllm" and checks.is_follower(settings.native):
        return _headless(settings)
    if settings.engine == "vllm" and engines.on_cpu():
        from headwater.ops import engine_host

        return engine_host.run(settings)
    plans = workers.plan(_one(settings))
    preflight.check(settings, plans)
    alone = workers.of_worker(settings, plans[0]._replace(name=settings.name))
    return process.run(lambda stop: run_engine.run_engine(alone, stop))


def _headless(settings: Settings) -> int:
    from headwater.engines.vllm import headless, native, share_imports
    from headwater.ops import engines, metrics, preflight, workers

    plan = workers.plan(_one(settings))
    preflight.check(settings, plan)
    folder = engines.model_folder(settings)
    name = settings.name or "headless"
    if settings.metrics_port:
        ranks = (native.value(settings.native, f"data_parallel_{which}") for which in ("rank", "start_rank"))
        rank = next((rank for rank in ranks if rank), "0")
        labels = {"worker": name, "pool": "", "role": settings.role, "rank": rank}
        metrics.serve(settings.metrics_port, settings.host, lambda: labels)
    alone = workers.of_worker(settings, plan[0])
    if engines.on_cpu():
        share_imports.preload(online="hf://" in settings.lora_sources)
    headless.run(engines.vllm_settings(alone, name, folder=folder, name=folder.name))
    return 0


def _one(settings: Settings) -> Settings:
    """The same settings for a single worker: without shared imports each one is a process of its own."""
    if (settings.workers or 1) > 1 or settings.prefill_workers or settings.decode_workers:
        raise ConfigError(
            f"this runs one {settings.engine} worker per process: use --role and start one process for each, or let "
            "`headwater up` do that"
        )
    return msgspec.structs.replace(settings, workers=1)
