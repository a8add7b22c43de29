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

IMAGE_SIDE: Final = 28
"""Pixels of the square that one token of an image stands for, after resizing: Qwen2-VL's."""

IMAGE_PIXELS_MIN: Final = 4 * IMAGE_SIDE**2
IMAGE_PIXELS_MAX: Final = 1_280 * IMAGE_SIDE**2
"""An image has 4 to 1,280 tokens."""

IMAGES_PER_PROMPT: Final = 16

VIDEO_FRAMES: Final = 16
FRAME_PIXELS_MAX: Final = 256 * IMAGE_SIDE**2
"""Two frames of a video have 4 to 256 tokens."""

VIDEOS_PER_PROMPT: Final = 4

AUDIO_RATE_HZ: Final = 16_000
AUDIO_STRIDE: Final = 640
"""Samples that one token of audio stands for: Qwen2-Audio's."""

AUDIO_SAMPLES_MAX: Final = 30 * AUDIO_RATE_HZ
AUDIO_PER_PROMPT: Final = 16

EMBEDDING_WIDTH: Final = 64
"""Values of float32 per token of an image's embedding."""

EMBEDDING_TOKENS: Final = (256 << 20) // (4 * EMBEDDING_WIDTH)
"""Tokens of images whose embeddings fit into 256 MiB."""

STEP_TOKENS_MAX: Final = 8_192
"""Tokens that one step computes at most."""

SEQUENCES_MAX: Final = 256
"""Requests that run at a time."""
