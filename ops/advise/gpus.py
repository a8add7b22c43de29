"""Types of GPUs: what their vendor publishes, and what engines reach of it.

Light to import: the command line reads types from here.
"""

from typing import Any, Final, NamedTuple

from headwater.engines.traits import Text


class GpuType(NamedTuple):
    """One type. `memory_mib` as nvidia-smi shows it; GB/s of its memory, and of its links to the other GPUs of a host in one direction; dense 16-bit
    TFLOPS (FP8 has twice as many where there is FP8).
    """

    memory_mib: int
    memory_gb_per_s: float
    tflops: float
    link_gb_per_s: float


TYPES: Final = {
    "A100-40": GpuType(40_960, 1_555, 312, 300),
    "A100-80": GpuType(81_920, 2_039, 312, 300),
    "L4": GpuType(23_034, 300, 121, 32),
    "L40S": GpuType(46_068, 864, 362, 32),
    "H100": GpuType(81_559, 3_350, 989, 450),
    "H200": GpuType(143_771, 4_800, 989, 450),
    "B200": GpuType(183_359, 8_000, 2_250, 900),
}
"""From NVIDIA's data sheets."""


class Gpus(NamedTuple):
    """GPUs of one host."""

    number: int
    type: str


def read_gpus(text: str) -> Gpus:
    """GPUs from `8xH100`. Raises `ValueError`."""
    number, _, name = text.partition("x")
    if not number.isdecimal() or int(number) < 1 or name not in TYPES:
        raise ValueError(f"{text!r}: write NUMBERxTYPE, as 8xH100; types are {', '.join(TYPES)}")
    return Gpus(int(number), name)


def write_gpus(gpus: Gpus) -> str:
    """Text that `read_gpus` reads."""
    return f"{gpus.number}x{gpus.type}"


GPUS: Final = Text(read_gpus, write_gpus, "NxTYPE", Any)
