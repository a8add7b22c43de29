"""LoRA adapters as files: fetched from their source into a local cache, and validated.

An adapter is two files in PEFT's layout, `adapter_config.json` and `adapter_model.safetensors`. No other file of the source
is kept, so nothing that runs code when it is loaded (.bin, .pt, .pkl) reaches an engine.
"""

from headwater.engines.lora_files.cache import LoraCache, LoraFolder
from headwater.engines.lora_files.sources import LoraError, LoraPolicy, Source, SourceMissing

__all__ = ["LoraCache", "LoraError", "LoraFolder", "LoraPolicy", "Source", "SourceMissing"]
