"""Default limits of adapters and embeddings. Light to import: the command line reads them from here."""

from typing import Final

LORA_MIB: Final = 4_096
"""Largest adapter."""

LORA_CACHE_MIB: Final = 65_536
"""Largest cache of adapters."""

LORA_FETCH_S: Final = 600.0
"""Longest fetch of an adapter."""


EMBEDDINGS_MIB: Final = 256
"""Room of one worker for embeddings of images, in MiB."""
