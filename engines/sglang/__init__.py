"""SGLang behind the `Engine` protocol. Only this package imports `sglang`, and only when an engine starts."""

from typing import Annotated, NamedTuple

from msgspec import Meta

from headwater.engines.traits import EngineEnvironment, EngineTraits, Processors, Words


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
    host: Annotated[
        str,
        Meta(
            description="address of this machine at which other workers reach this one, if it only prefills or only decodes: its "
            "bootstrap server and NIXL (default: loopback; required where NATS is on another machine)"
        ),
    ] = ""
    bootstrap_port: Annotated[
        int,
        Meta(
            ge=0,
            le=65535,
            description="port of a prefill worker's bootstrap server (default: a free one)",
        ),
    ] = 0
    gpus_per_worker: Annotated[
        int,
        Meta(
            ge=0,
            description="GPUs per SGLang worker (default: tensor-parallel size × pipeline-parallel size)",
        ),
    ] = 0
    logits_processors: Processors = {}  # noqa: RUF012 (the default of a NamedTuple, never changed)
    allow_vulnerable_engine: Annotated[
        bool, Meta(description="start an SGLang with known vulnerabilities")
    ] = False


TRAITS = EngineTraits(
    title="SGLang",
    options=SglangOptions,
    launcher="headwater.engines.sglang.launcher:SglangLauncher",
    loads="weights",
    encoder="SGLang (no audio)",
    joins_others=True,
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
