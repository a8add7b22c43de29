"""TensorRT-LLM behind the `Engine` protocol. Only this package imports `tensorrt_llm`, and only when an engine starts.

Written from its documented API; it has not run on hardware. What is called of it is recorded in `config`.
"""

from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta

from headwater.engines.traits import EngineTraits, Table

HandoffMode = Literal["context-first", "generation-first", "opaque"]
"""How prefill and decode legs are joined.

context-first: the decode leg starts with the parameters that the prefill leg returned. generation-first: both legs start
at once, and the decode leg fetches from the prefill leg's endpoint. opaque: as context-first, with the first tokens that
the prefill generated handed over apart from the opaque state.
"""


class TensorRtOptions(NamedTuple):
    """Options of TensorRT-LLM."""

    file: Annotated[str, Meta(description="YAML file with arguments of TensorRT-LLM's LLM class")] = ""
    overrides: Annotated[
        Table,
        Meta(
            description="arguments that replace those of the file, as JSON or a table: "
            '{"kv_cache_config": {"free_gpu_memory_fraction": 0.8}}'
        ),
    ] = {}  # noqa: RUF012 (the default of a NamedTuple, never changed)
    handoff: Annotated[
        HandoffMode,
        Meta(
            description="how prefill and decode legs are joined: the decode leg starts after the prefill, both start at once, "
            "or the first tokens are handed over apart from the opaque state"
        ),
    ] = "context-first"
    logits_processors: Mapping[str, str] = {}
    allow: tuple[str, ...] = ()


TRAITS = EngineTraits(
    title="TensorRT-LLM",
    options=TensorRtOptions,
    refusals=("vulnerable", "faults"),
    loads="weights",
    # It counts no preemptions.
    metrics={
        "trtllm_prompt_tokens": "prompt_tokens",
        "trtllm_prompt_cached_tokens": "cached_prompt_tokens",
        "trtllm_generation_tokens": "generated_tokens",
        "trtllm_request_queue_time_seconds": "queue_seconds",
        "trtllm_time_to_first_token_seconds": "time_to_first_token_seconds",
        "trtllm_time_per_output_token_seconds": "time_per_output_token_seconds",
        "trtllm_e2e_request_latency_seconds": "request_seconds",
    },
    launcher="headwater.engines.tensorrt_llm.launcher:TensorRtLauncher",
)
