"""LoRA adapters of one worker, from its settings."""

import tempfile
from pathlib import Path

from headwater.actors.worker.lora.manager import LoraSettings
from headwater.actors.worker.lora.restart_list import RestartList
from headwater.engines.lora_files import LoraCache, LoraError, LoraPolicy
from headwater.engines.lora_files.policy import parse_networks, parse_sources
from headwater.ops.config.cache_dir import cache_folder
from headwater.ops.config.errors import ConfigError
from headwater.ops.config.processes import EngineProcess


def adapters_of(settings: EngineProcess, worker: str) -> LoraSettings:
    """How the worker of this name handles adapters. Raises `ConfigError`."""
    lora = settings.lora
    try:
        policy = LoraPolicy(
            parse_sources(lora.sources),
            parse_networks(lora.networks),
            lora.max_mib << 20,
            lora.fetch_s,
            lora.cache_mib << 20,
        )
    except LoraError as error:
        raise ConfigError(f"--lora-sources, --lora-networks: {error}") from error
    if not policy.sources:
        if lora.loading.on_demand:
            raise ConfigError(
                "--lora-on-demand needs --lora-sources: give the locations that adapters may come from"
            )
        return LoraSettings()
    cache = cache_folder(settings.cache_dir)
    # Without a cache folder adapters live as long as the machine's temporary files.
    root = cache / "adapters" if cache else Path(tempfile.mkdtemp(prefix="headwater-adapters-"))
    names = cache / "adapters" / ".workers" / f"{settings.nats.namespace}.{worker}.json" if cache else None
    return LoraSettings(LoraCache(root, policy), lora.loading, settings.drain_timeout, RestartList(names))
