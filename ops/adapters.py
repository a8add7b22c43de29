"""From settings to how a worker handles LoRA adapters."""

import tempfile
from pathlib import Path

from headwater.actors.adapter_memory import AdapterMemory
from headwater.actors.adapters import AdapterSettings
from headwater.engines.adapter_files import AdapterError, AdapterFiles, AdapterPolicy
from headwater.engines.adapter_files.policy import parse_networks, parse_sources
from headwater.ops.config import ConfigError, Settings, cache_dir


def settings_of(settings: Settings, worker: str) -> AdapterSettings:
    """How the worker of this name handles adapters. Raises `ConfigError`."""
    try:
        policy = AdapterPolicy(
            parse_sources(_listed(settings.lora_sources)),
            parse_networks(_listed(settings.lora_networks)),
            settings.lora_max_mib << 20,
            settings.lora_fetch_s,
            settings.lora_cache_mib << 20,
        )
    except AdapterError as error:
        raise ConfigError(f"--lora-sources, --lora-networks: {error}") from error
    if not policy.sources:
        if settings.lora_on_demand == "yes":
            raise ConfigError("--lora-on-demand yes needs --lora-sources: from where may adapters be loaded?")
        return AdapterSettings()
    cache = cache_dir(settings)
    # With no folder to keep anything, adapters live as long as the machine's temporary files.
    root = cache / "adapters" if cache else Path(tempfile.mkdtemp(prefix="headwater-adapters-"))
    memory = cache / "adapters" / ".workers" / f"{settings.namespace}.{worker}.json" if cache else None
    return AdapterSettings(
        AdapterFiles(root, policy),
        settings.lora_on_demand == "yes",
        settings.lora_load_s,
        settings.drain_s,
        settings.lora_check_base == "yes",
        AdapterMemory(memory),
    )


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
