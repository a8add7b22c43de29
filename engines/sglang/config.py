"""SGLang's configuration: its arguments, what follows from them, and the known releases.

If Headwater's settings and SGLang's own arguments both set a value, they must agree. Unset values are SGLang's defaults, except
those that the adapter relies on, and on a CPU, where SGLang's are for a GPU.
"""

import json
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from headwater.engines import logs, native_arguments, process
from headwater.engines.engine import TOKEN_CAPABILITIES, EngineUnavailable
from headwater.engines.launcher import SGLANG_DIFFUSION_BROKER, EngineSettings, Releases, Vulnerability
from headwater.engines.sglang import SglangOptions
from headwater.engines.sglang.signatures import Signatures
from headwater.schemas.events import Role
from headwater.schemas.names import LOOPBACK
from headwater.schemas.tables import Capability

Mode = Literal["prefill", "decode"]

ENVIRONMENT: Final[Mapping[str, str]] = {
    # SGLang's default, 5 s, twice: a dead prefill engine is noticed after 10 s. 2 s is the least that it takes.
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
    # Else UCX keeps the GPU memory of a dead prefill engine mapped, and it could not start again.
    "UCX_CUDA_IPC_CACHE": "n",
}
CPU_ENVIRONMENT: Final[Mapping[str, str]] = {
    # It uses CUDA events, also without CUDA.
    "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "0"
}


def mode_of(role: Role, native: Mapping[str, Any]) -> Mode | None:
    """The mode of an engine whose worker has this role, None for whole requests. Raises `EngineUnavailable`."""
    native_mode = native.get("disaggregation_mode")
    # An encode worker has no KV.
    mode: Mode | None = None if role == "both" or role == "encode" else role
    if native_mode is not None and native_mode != (mode or "null"):
        raise EngineUnavailable(
            f"--role {role} and, among SGLang's own arguments, --disaggregation-mode {native_mode} disagree: omit the latter"
        )
    if mode is not None and int(native.get("dp_size") or 1) > 1:
        raise EngineUnavailable(
            f"--role {role} with --dp-size {native['dp_size']} is not implemented: start one worker for each rank"
        )
    return mode


def disaggregation_arguments(mode: Mode | None, host: str, port: int, *, cpu: bool) -> dict[str, Any]:
    """Arguments of an engine that prefills or decodes. `host` is where other workers reach it."""
    if mode is None:
        return {}
    arguments: dict[str, Any] = {
        "disaggregation_mode": mode,
        "disaggregation_transfer_backend": "nixl",
        "host": host,
        "disaggregation_bootstrap_port": port,
    }
    if cpu and mode == "decode":
        # Where requests go that are retracted for lack of memory; its default needs CUDA.
        arguments["disaggregation_decode_retraction_backup"] = "cpu_tensor"
    return arguments


def environment(host: str, *, cpu: bool) -> dict[str, str]:
    """Environment variables of an engine that prefills or decodes."""
    return {"SGLANG_HOST_IP": host, **ENVIRONMENT, **(CPU_ENVIRONMENT if cpu else {})}


LOG_CONFIG: Final = "SGLANG_LOGGING_CONFIG_PATH"

PER_BATCH: Final = "sglang.srt.managers.scheduler_components.metrics_reporter"
"""Logs a line for each batch at the level info. Its numbers are among the metrics."""


def log_as_this_process(folder: Path, level: str) -> None:
    """Have SGLang's processes log as this one does, at a level of SGLang's, unless the operator has configured them.

    `folder` is private, and lives as long as they do.
    """
    process.pass_logs_on(
        LOG_CONFIG, folder, {"sglang": level, PER_BATCH: "warning" if level == "info" else level}
    )


def free_port(host: str) -> int:
    """A TCP port of this machine that is free now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


# Conversion of Headwater's settings and SGLang's own arguments to arguments of its `Engine`.

CPU_PAGE_SIZE: Final = 32
"""The page size on a CPU, which is that of vLLM's blocks: workers of both engines may then serve one pool."""

PAGE_SIZE: Final = 16
"""SGLang's own default is pages of one token: an event, a hash and an index entry for each token."""

CPU_TOKENS: Final = 32_768
CPU_RUNNING: Final = 16

CPU: Final[Mapping[str, Any]] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    # Most CPUs have no bf16 arithmetic and emulate it.
    "dtype": "float32",
    "page_size": CPU_PAGE_SIZE,
    "max_total_tokens": CPU_TOKENS,
    "max_running_requests": CPU_RUNNING,
    # An idle scheduler would keep a core busy.
    "sleep_on_idle": True,
}

OWNED: Final[Mapping[str, str]] = {
    "incremental_streaming_output": "the adapter reads new tokens only",
    "tokenizer_worker_num": "the adapter is the only one that sends requests",
    "grpc_port": "Headwater's edge replaces SGLang's servers",
    "sidecar": "Headwater's edge replaces SGLang's servers",
    "config": "Headwater reads SGLang's arguments from a table of its own file (--config-key)",
}
"""Arguments that are rejected, with the reason."""


SglangSettings = EngineSettings[SglangOptions]
"""Zero and empty mean: choose for this machine."""


def host_of(settings: SglangSettings) -> str:
    """The address at which other workers reach this one, if it prefills or decodes only."""
    return settings.options.handoff_host or LOOPBACK


def keyword_arguments(
    settings: SglangSettings, native_options: Mapping[str, Any], events: str, replay: str, *, cpu: bool
) -> dict[str, Any]:
    """All arguments of `Engine`. `native_options` are the parsed native ones; `events` and `replay` the sockets for KV events.

    Raises `EngineUnavailable` naming the invalid argument.
    """
    _reject_owned(native_options)
    worker, options = settings.worker, settings.options
    native_arguments.check_agreement(
        "SGLang",
        native_options,
        {
            "--block-size": (worker.block_size, "page_size"),
            "--max-model-len": (worker.max_model_len, "context_length"),
        },
    )
    _check_nodes(worker.role, native_options)
    mode = mode_of(worker.role, native_options)
    arguments: dict[str, Any] = {"page_size": PAGE_SIZE, **(CPU if cpu else {})}
    arguments |= {
        "log_level": logs.level(),
        # New tokens only: otherwise each chunk has all tokens of its request so far.
        "incremental_streaming_output": True,
        # Left to the model, JSON may be white space without end.
        "constrained_json_disable_any_whitespace": True,
        # The adapter sends no request before it is ready.
        "skip_server_warmup": True,
        # It rejects what does not fit: nothing is cut off silently.
        "allow_auto_truncate": False,
    }
    arguments |= disaggregation_arguments(mode, host_of(settings), options.handoff_port, cpu=cpu)
    if worker.block_size:
        arguments["page_size"] = worker.block_size
    if worker.max_model_len:
        arguments["context_length"] = worker.max_model_len
    if worker.reads_embeddings:
        # Its only effect here: a batch may have requests with embeddings next to others with pixels, on which the scheduler would end.
        arguments["enable_adaptive_dispatch_to_encoder"] = True
    if worker.exports_metrics:
        arguments["enable_metrics"] = True
    if endpoint := worker.traces.announced("sglang", worker.name).endpoint:
        arguments |= {"enable_trace": True, "otlp_traces_endpoint": endpoint}
    if options.logits_processors:
        arguments["enable_custom_logit_processor"] = True
    if native_options.get("enable_priority_scheduling"):
        # As in vLLM and in the API: a lower number is more urgent.
        arguments["schedule_low_priority_values_first"] = True
    if native_options.get("enable_memory_saver"):
        # Without it the weights of an engine that slept are zeros, and no error says so.
        arguments["enable_weights_cpu_backup"] = True
    return (
        arguments
        | dict(native_options)
        | {"model_path": worker.model, "kv_events_config": _kv_events(native_options, events, replay)}
    )


def _reject_owned(native_options: Mapping[str, Any]) -> None:
    for name, reason in OWNED.items():
        if name in native_options:
            raise EngineUnavailable(f"--{name.replace('_', '-')} is not supported here: {reason}; omit it")


def _check_nodes(role: Role, native_options: Mapping[str, Any]) -> None:
    """Raise for what an engine of several nodes cannot do here."""
    nodes = int(native_options.get("nnodes") or 1)
    if nodes == 1:
        return
    if not native_options.get("dist_init_addr"):
        raise EngineUnavailable(
            f"--nnodes {nodes} without --dist-init-addr: give all nodes HOST:PORT of the first one, with a free port"
        )
    if int(native_options.get("dp_size") or 1) > 1:
        raise EngineUnavailable(
            f"--dp-size {native_options['dp_size']} with --nnodes {nodes} is not implemented, since each rank publishes its KV events "
            "on its own node: start one worker for each rank"
        )
    if role != "both":
        raise EngineUnavailable(
            f"--role {role} with --nnodes {nodes} is not implemented: prefill and decode workers have one node each"
        )


def _kv_events(native_options: Mapping[str, Any], events: str, replay: str) -> str:
    """The configuration of KV events: the default, or a native one that publishes them."""
    text = native_options.get("kv_events_config")
    if not text:
        return json.dumps(
            {"publisher": "zmq", "endpoint": events, "replay_endpoint": replay, "topic": "kv-events"}
        )
    try:
        native = json.loads(text)
    except ValueError as error:
        raise EngineUnavailable(f"--kv-events-config {text}: {error}. Give a JSON object") from error
    if not isinstance(native, dict) or native.get("publisher") != "zmq":
        raise EngineUnavailable(
            '--kv-events-config disables KV events, which routing requires: set "publisher": "zmq", or omit it'
        )
    return json.dumps({"endpoint": events, "replay_endpoint": replay, **native})


# Capabilities of a started SGLang, from its actual configuration and release.

POSSIBLE: Final = TOKEN_CAPABILITIES - {"bad_words"}
"""What an engine can do in some configuration."""


def capabilities(
    config: Mapping[str, Any], *, generates: bool, processors: Mapping[str, str], signatures: Signatures
) -> frozenset[Capability]:
    """Return what an engine with these resolved arguments (by `ServerArgs`' names) can do, except media: its model decides about these.

    SGLang has no allowed tokens and no bad words.
    """
    supported: set[Capability] = {"pause", "profile"}
    if generates:
        supported |= {"generate", "logprobs", "prompt_logprobs"}
        # A grammar is compiled for the tokenizer's vocabulary.
        if not config.get("skip_tokenizer_init") and config.get("grammar_backend") not in (None, "none"):
            supported.add("guide")
        if not config.get("speculative_algorithm"):
            supported.add("logit_bias")
            if processors:
                supported.add("processors")
        # Other requests are sampled without seeds.
        if config.get("enable_deterministic_inference"):
            supported.add("seed")
        if config.get("enable_strict_thinking") and signatures.has("GenerateReqInput", "max_thinking_tokens"):
            supported.add("thinking_budget")
        if all(signatures.has(kind, "cache_salt") for kind in ("GenerateReqInput", "BlockStored")):
            supported.add("cache_salt")
    else:
        supported.add("embed")
    if not config.get("disable_radix_cache"):
        supported |= {"kv_events", "kv_dump", "clear_kv"}
    if config.get("enable_priority_scheduling"):
        supported.add("priority")
    # Adapters share block hashes in events that do not name them: what one stored would count for another.
    named = signatures.has("BlockStored", "lora_name")
    if config.get("enable_lora") and int(config.get("dp_size") or 1) == 1 and named:
        supported.add("lora")
    if config.get("enable_memory_saver"):
        supported.add("sleep")
    if config.get("disaggregation_mode") in ("prefill", "decode"):
        supported |= {"handoff", "split_only"}
    return frozenset(supported)


# SGLang's own arguments: words of a command line, parsed by SGLang's parser.


def parse(words: Sequence[str]) -> dict[str, Any]:
    """The values that these words set, by `ServerArgs`' names: see `native_arguments.parse`. Raises `EngineUnavailable`."""
    from sglang.srt.server_args import ServerArgs

    return native_arguments.parse("SGLang", words, ServerArgs.add_cli_args)


# The installed SGLang, and releases with known vulnerabilities.

OLDEST: Final = (0, 5, 17)
"""The first release that this adapter was used with."""


VULNERABILITIES: Final = (
    SGLANG_DIFFUSION_BROKER,
    Vulnerability(
        "CVE-2026-3060", (0, 5, 10), "unpickles data from an open port (encoder disaggregation)", refused=True
    ),
)
"""CVE-2026-5760 (a chat template of a GGUF file, at a rerank request) and CVE-2026-3989 (a replay script for dumped requests)
are not among them: the edge renders templates itself, in a sandbox, and the script is not part of a worker.
"""

RELEASES: Final = Releases("SGLang", ("sglang",), VULNERABILITIES, "--allow vulnerable", OLDEST)

installed = RELEASES.installed
