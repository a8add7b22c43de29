"""Defaults of the simulated engine. Light to import: the command line and what-if read them from here."""

from typing import Final

BLOCK_SIZE: Final = 16
"""Tokens per KV block."""

TOTAL_BLOCKS: Final = 16_384
"""KV blocks per worker."""

KV_BYTES_PER_TOKEN: Final = 131_072
"""KV cache per token of an 8B-class model (32 layers, 8 KV heads of 128, 16 bits)."""

TRANSFER_GB_PER_S: Final = 20.0
"""Bandwidth of one KV transfer between workers, GB/s."""
