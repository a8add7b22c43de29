"""The simulated engine: a paged KV cache, a scheduler and a step-time model without a GPU; here are its defaults and options.

Light to import: the command line and what-if read the defaults and the model of step times from here.

The default coefficients were derived from single-request runs of NVIDIA Dynamo 1.2.1's mocker (its default timing model);
they represent an 8B-class model on one datacentre GPU. Those of images were measured on an H200, with a vision encoder of
Qwen2-VL's shape (docs/benchmarks/images.md).
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from msgspec import Meta

from headwater.engines.traits import EngineTraits, Text

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


# The simulator's model of the duration of an engine step.


class StepTime(NamedTuple):
    """prefill(x) + decode(p) milliseconds for a step that computes x prompt tokens.

    `p` is the fraction of KV blocks in use; decode(p) counts when any sequence gets a token in the step. The images that a step encodes
    take A·n² + B·n for each, of n tokens, and C once: `encode_ms` is (A, B, C).
    """

    prefill_ms: tuple[float, float, float] = (4.209989e-07, 1.518344e-02, 16.50142)
    decode_ms: tuple[float, float, float] = (-25.74, 54.01, 5.74)
    encode_ms: tuple[float, float, float] = (1.09e-05, 3.51e-03, 12.7)

    def seconds(self, prompt_tokens: int, used_fraction: float, decoding: bool) -> float:
        """Duration of one step in seconds."""
        total = _polynomial(self.prefill_ms, prompt_tokens) if prompt_tokens else 0.0
        if decoding:
            total += _polynomial(self.decode_ms, used_fraction)
        return total / 1000

    def encode_seconds(self, images: Iterable[int]) -> float:
        """Time to encode images of these numbers of tokens in one step, in seconds."""
        square, linear, constant = self.encode_ms
        each = [(square * tokens + linear) * tokens for tokens in images]
        return (sum(each) + constant) / 1000 if each else 0.0


ZERO = StepTime((0.0, 0.0, 0.0), (0.0, 0.0, 0.0), (0.0, 0.0, 0.0))
"""Zero duration: for measuring everything except the engine."""


def _polynomial(coefficients: tuple[float, float, float], x: float) -> float:
    square, linear, constant = coefficients
    return (square * x + linear) * x + constant


# The notation of step times: as a setting of the engine, and of a what-if.

NAMED: Final = {"default": StepTime(), "zero": ZERO}

STEP_TIME_FORMS: Final = (
    "milliseconds of a step: prefill A·x² + B·x + C for x tokens, decode D·p² + E·p + F at p of the blocks in use, and for the images "
    "that it encodes G·n² + H·n for each of n tokens and I once; A,B,C,D,E,F or A,B,C,D,E,F,G,H,I, a JSON file with prefill_ms, "
    "decode_ms and encode_ms, or a name: default, zero"
)


class _StepTimeFile(msgspec.Struct, forbid_unknown_fields=True):
    prefill_ms: tuple[float, float, float]
    decode_ms: tuple[float, float, float]
    encode_ms: tuple[float, float, float] = StepTime().encode_ms

    def step_time(self) -> StepTime:
        return StepTime(self.prefill_ms, self.decode_ms, self.encode_ms)


def read_step_time(text: str) -> StepTime:
    """Step times from their name, from six or nine numbers, or from the name of a JSON file. Raises `ValueError`."""
    if text in NAMED:
        return NAMED[text]
    parts = text.split(",")
    if len(parts) in (6, 9):
        numbers = list(map(float, parts))
        if not all(map(math.isfinite, numbers)):
            raise ValueError("a coefficient is not a finite number")
        each = [(a, b, c) for a, b, c in zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)]
        return StepTime(*each)
    try:
        return msgspec.json.decode(Path(text).read_bytes(), type=_StepTimeFile).step_time()
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(
            f"neither {' nor '.join(NAMED)}, nor six or nine numbers separated by commas, nor a file of step times: {error}"
        ) from error


def write_step_time(value: StepTime) -> str:
    """Text that `read_step_time` reads."""
    for name, step_time in NAMED.items():
        if value == step_time:
            return name
    return ",".join(str(number) for part in value for number in part)


STEP_TIME: Final = Text(read_step_time, write_step_time, "TIMES", Any)


class SimOptions(NamedTuple):
    """Options of the simulated engine."""

    step_time: Annotated[
        StepTime,
        STEP_TIME,
        Meta(description=f"simulated engine: {STEP_TIME_FORMS}", examples=["zero"]),
    ] = StepTime()
    blocks: Annotated[int, Meta(ge=16, description="simulated engine: KV blocks per worker")] = TOTAL_BLOCKS


TRAITS = EngineTraits(
    title="Simulated engine",
    options=SimOptions,
    launcher="headwater.engines.sim.engine:SimLauncher",
    encoder="the simulated engine",
    takes_embeddings="the simulated engine",
    transport="shared",
    metrics={
        "sim_prompt_tokens": "prompt_tokens",
        "sim_cached_tokens": "cached_prompt_tokens",
        "sim_generated_tokens": "generated_tokens",
        "sim_preemptions": "preemptions",
        "sim_queue_seconds": "queue_seconds",
        "sim_first_token_seconds": "time_to_first_token_seconds",
        "sim_token_seconds": "time_per_output_token_seconds",
        "sim_request_seconds": "request_seconds",
    },
)
