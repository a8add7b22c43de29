"""LoRA adapters as files: from where they are published into a cache on this machine, checked on the way.

An adapter is two files in PEFT's layout, `adapter_config.json` and `adapter_model.safetensors`. Nothing else of its
source is ever kept, so nothing that runs code when it is loaded (.bin, .pt, .pkl) reaches an engine.
"""

from headwater.engines.adapter_files.cache import AdapterFiles, AdapterFolder
from headwater.engines.adapter_files.errors import AdapterError, SourceMissing
from headwater.engines.adapter_files.policy import AdapterPolicy, Source

__all__ = ["AdapterError", "AdapterFiles", "AdapterFolder", "AdapterPolicy", "Source", "SourceMissing"]
