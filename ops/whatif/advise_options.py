"""Options of `headwater advise`, and types of GPUs: what their vendor publishes, and what engines reach of it.

Light to import: the command line reads types, defaults and descriptions from here.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, NamedTuple

from msgspec import Meta

from headwater.engines.sim import STEP_TIME, STEP_TIME_FORMS, TRANSFER_GB_PER_S, StepTime
from headwater.engines.traits import Text
from headwater.ops.bench.options import read_limits, write_limits
from headwater.ops.config.setting import Flag


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


MEASURES = ("ttft", "itl", "e2e")
"""Limits that a simulation can check: it has no gap between two tokens of a request."""


def _read_slo(text: str) -> dict[str, float]:
    limits = read_limits(text)
    if unknown := [name for name in limits if name not in MEASURES]:
        raise ValueError(f"{', '.join(unknown)} cannot be simulated: limits are {', '.join(MEASURES)}")
    if not limits:
        raise ValueError("at least one limit is needed, as ttft=2s,itl=50ms")
    return limits


class Advice(NamedTuple):
    """What is to be served on what, and how well."""

    gpus: Annotated[Gpus, GPUS, Meta(description="GPUs of one host, as 8xH100")] = Gpus(0, "")
    model: Annotated[str, Meta(description="folder of the model, or its config.json")] = ""
    slo: Annotated[
        Mapping[str, float],
        Text(_read_slo, write_limits, "LIMITS", Any),
        Meta(
            description="limits of goodput: ttft, itl (a request's mean time between two tokens), e2e (default: ttft=2s,itl=50ms)"
        ),
    ] = MappingProxyType({"ttft": 2_000.0, "itl": 50.0})
    step_time: Annotated[
        StepTime,
        STEP_TIME,
        Meta(
            description=f"measured step times of one worker (default: those of a log; else a roofline of what is published): {STEP_TIME_FORMS}"
        ),
    ] = StepTime((0.0, 0.0, 0.0), (0.0, 0.0, 0.0))
    measured_tp: Annotated[
        int,
        Meta(
            ge=1,
            description="tensor parallelism of the worker that --step-time or the log is of; others are scaled from it",
        ),
    ] = 1
    roles: Annotated[
        Literal["all", "aggregated"],
        Meta(description="layouts to try: prefill and decode workers, too, or aggregated ones only"),
    ] = "all"
    kv_dtype: Annotated[
        Literal["16bit", "fp8"], Meta(description="values of the KV cache: 2 bytes, or 1 byte")
    ] = "16bit"
    transfer_gb_per_s: Annotated[
        float, Meta(gt=0, description="bandwidth of one KV transfer between workers, GB/s")
    ] = TRANSFER_GB_PER_S
    speed: Annotated[float, Meta(gt=0, description="divisor of the arrival times: the load to plan for")] = (
        1.0
    )
    requests: Annotated[int, Meta(ge=0, description="only the first N requests; 0: all")] = 2_000
    jobs: Annotated[int, Meta(ge=1, description="layouts simulated in parallel")] = 1
    seed: Annotated[
        int, Meta(ge=0, description="seed of the arrivals that are moved to see how sure the advice is")
    ] = 0
    as_json: Annotated[bool, Flag("json"), Meta(description="print JSON")] = False
