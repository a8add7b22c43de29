"""SGLang behind the `Engine` protocol. Only this package imports `sglang`, and only when an engine starts."""

from collections.abc import Mapping
from typing import Annotated, NamedTuple

from msgspec import Meta

from headwater.engines.traits import EngineEnvironment, EngineTraits, Words


class SglangOptions(NamedTuple):
    """Options of SGLang. Its own arguments follow after `--` with --engine sglang."""

    native: Annotated[
        Words,
        Meta(description="SGLang's own arguments as one text; on a command line better after `--`"),
    ] = ()
    python: Annotated[
        str,
        Meta(
            description="Python of an environment with SGLang and Headwater (default: this one if it has SGLang, else one that "
            "is made on first use, in the user's cache folder)"
        ),
    ] = ""
    gpus_per_worker: int = 0
    handoff_host: str = ""
    handoff_port: int = 0
    logits_processors: Mapping[str, str] = {}
    allow: tuple[str, ...] = ()


TRAITS = EngineTraits(
    title="SGLang",
    options=SglangOptions,
    launcher="headwater.engines.sglang.launcher:SglangLauncher",
    loads="weights",
    encoder="SGLang (no audio)",
    joins_others=True,
    refusals=("vulnerable",),
    writes_metric_files=True,
    metrics={
        "sglang:prompt_tokens": "prompt_tokens",
        "sglang:cached_tokens": "cached_prompt_tokens",
        "sglang:generation_tokens": "generated_tokens",
        "sglang:num_retracted_requests": "preemptions",
        "sglang:queue_time_seconds": "queue_seconds",
        "sglang:time_to_first_token_seconds": "time_to_first_token_seconds",
        "sglang:request_time_per_output_token_seconds": "time_per_output_token_seconds",
        "sglang:e2e_request_latency_seconds": "request_seconds",
    },
    rank_label="dp_rank",
    shared_arguments={
        "model": ("model_path", "model"),
        "model_revision": ("revision",),
        "served_model_name": ("served_model_name",),
        "chat_template": ("chat_template",),
    },
    kept_back=("model_path", "model", "revision", "served_model_name", "chat_template"),
    environment=EngineEnvironment("sglang", "sglang", "9.5 GB", per_worker=True),
)
