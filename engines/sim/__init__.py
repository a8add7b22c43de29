"""The simulated engine: a paged KV cache, a scheduler and a step-time model without a GPU."""

from typing import Annotated, NamedTuple

from msgspec import Meta

from headwater.engines.sim.defaults import STEP_TIME, STEP_TIME_FORMS, TOTAL_BLOCKS, StepTime
from headwater.engines.traits import EngineTraits


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
