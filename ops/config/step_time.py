"""The notation of the simulated engine's step times: as a setting of the engine, and of a what-if."""

import math
from pathlib import Path
from typing import Final

import msgspec

from headwater.engines.sim.defaults import ZERO, StepTime

NAMED: Final = {"default": StepTime(), "zero": ZERO}

METAVAR: Final = "TIMES"

DESCRIPTION: Final = (
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
    for name, known in NAMED.items():
        if value == known:
            return name
    return ",".join(str(number) for part in value for number in part)
