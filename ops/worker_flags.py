"""Command lines of the engine processes that `headwater up` starts."""

import msgspec

from headwater.ops.config import LORA, Settings
from headwater.ops.workers import WorkerPlan

PASSED = (
    "model",
    "served_model_name",
    "chat_template",
    "block_size",
    "max_model_len",
    "kv_cache_mib",
    "dtype",
    "tier",
    "sim_step_time",
    "sim_blocks",
    "connector",
    "nixl_host",
    "allow_mixed_versions",
    "allow_vulnerable_engine",
    "canary_s",
    "probe_s",
    "cache_dir",
    *LORA,
)
"""Settings that each engine process gets as they are."""


def common(settings: Settings) -> list[str]:
    """What all of them get."""
    flags = ["--engine", settings.engine]
    for name in PASSED:
        value = getattr(settings, name)
        if value:
            flags += ["--" + name.replace("_", "-"), str(value)]
    # Zero means something here: no probes.
    flags += ["--probe-idle-s", str(settings.probe_idle_s)]
    if settings.model_aliases:
        flags += ["--model-aliases", ",".join(settings.model_aliases)]
    if settings.logits_processors:
        pairs = (f"{name}={where}" for name, where in settings.logits_processors.items())
        flags += ["--logits-processors", ",".join(pairs)]
    for name in settings.taint:
        flags += ["--taint", name]
    if settings.connector_options:
        flags += ["--connector-options", msgspec.json.encode(settings.connector_options).decode()]
    return flags


def together(settings: Settings) -> list[str]:
    """For one process that hosts all workers, and plans them in the same way."""
    flags: list[str] = []
    for name in ("workers", "prefill_workers", "decode_workers", "nixl_port", "metrics_port"):
        value = getattr(settings, name)
        if value:
            flags += ["--" + name.replace("_", "-"), str(value)]
    return flags


def of(worker: WorkerPlan) -> list[str]:
    """For one worker's own process."""
    flags = ["--name", worker.name, "--role", worker.role]
    for name, port in (("--nixl-port", worker.nixl_port), ("--metrics-port", worker.metrics_port)):
        if port:
            flags += [name, str(port)]
    return flags
