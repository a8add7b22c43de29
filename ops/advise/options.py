"""Options of `headwater advise`.

Light to import: the command line reads them from here.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta

from headwater.engines.sim.defaults import STEP_TIME, STEP_TIME_FORMS, TRANSFER_GB_PER_S, StepTime
from headwater.engines.traits import Text
from headwater.ops.advise.gpus import GPUS, Gpus
from headwater.ops.config.setting import Flag
from headwater.ops.load.options import read_limits, write_limits

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
