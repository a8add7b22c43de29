"""Configuration of vLLM: its arguments, what follows from them, and the known releases.

Everything except `parse` works without vLLM, so that mistakes are found without an import of half a minute.

If Headwater's settings and vLLM's own arguments both set a value, they must agree. Unset values are vLLM's defaults, except on a
CPU, where these are for servers with hundreds of cores.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final, NamedTuple

from headwater.engines import logs, native_arguments, process
from headwater.engines.engine import TOKEN_CAPABILITIES, EngineUnavailable, RequestRejected
from headwater.engines.launcher import EngineSettings, PortRange, Releases, Vulnerability, release
from headwater.engines.native_arguments import check_agreement, has, name_of, number, value
from headwater.engines.vllm import VllmOptions, handoff
from headwater.engines.vllm.handoff import can_hand_over
from headwater.schemas.events import Role
from headwater.schemas.names import LOOPBACK, host_port, pool_name
from headwater.schemas.tables import Capability, ModelCard


def parse(words: Sequence[str]) -> dict[str, Any]:
    """The values that these words set, by `AsyncEngineArgs`'s names: see `native_arguments.parse`. Raises `EngineUnavailable`."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return native_arguments.parse(
        "vLLM", words, AsyncEngineArgs.add_cli_args, base=FlexibleArgumentParser, explain=_of_http_server
    )


def _of_http_server(flag: str) -> str:
    """Return what to do with a flag of vLLM's HTTP server, "" for another."""
    try:
        from vllm.entrypoints.launchers.cli_args import FrontendArgs
    except ImportError:
        return ""
    if name_of(flag) not in getattr(FrontendArgs, "__dataclass_fields__", {}):
        return ""
    return "it belongs to vLLM's HTTP server, which Headwater's edge replaces: omit it"


# Conversion of Headwater's settings and vLLM's own arguments to those of AsyncEngineArgs.

CPU_BLOCK_SIZE = 32
CPU_KV_CACHE_MIB = 512
MIB = 1024 * 1024


VllmSettings = EngineSettings[VllmOptions]
"""Zero and empty mean: choose for this machine."""


def connectors_of(settings: VllmSettings) -> tuple[str, ...]:
    """The connectors of the worker, by short names in order."""
    return role(settings.worker.role, settings.options.connector, settings.options.native)


def transfer_config(settings: VllmSettings, *, cpu: bool) -> dict[str, Any] | None:
    """See `handoff.transfer_config`. An encode worker has no connectors, whatever the others of its fleet have."""
    options = {} if settings.worker.role == "encode" else settings.options.connector_options
    return handoff.transfer_config(connectors_of(settings), options, cpu=cpu)


KEPT_MAPPINGS: Final = "UCX_CUDA_IPC_CACHE"
"""UCX keeps mappings of GPU memory of other processes, and so the memory of dead ones: a prefill worker could not start again until its
decode workers had ended."""


def environment(settings: VllmSettings) -> None:
    """Set what vLLM, and UCX below NIXL, read only from the environment. Call before the engine is created."""
    options = settings.options
    if handoff.hands_over(connectors_of(settings)) or has(options.native, "kv_transfer_config"):
        os.environ.setdefault(KEPT_MAPPINGS, "n")
    # In the environment it is in whole GiB, and would override the argument.
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    if options.handoff_port:
        os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = options.handoff_host or LOOPBACK
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(options.handoff_port)


LOG_CONFIG: Final = "VLLM_LOGGING_CONFIG_PATH"


def log_as_this_process(folder: Path) -> None:
    """Have vLLM's processes log as this one does, unless the operator has configured them. Call before vLLM is imported.

    `folder` is private, and lives as long as they do. Where vLLM is imported already they are forks, which need no configuration.
    """
    if "VLLM_CONFIGURE_LOGGING" in os.environ:
        return
    level = os.environ.get("VLLM_LOGGING_LEVEL", logs.level().upper())
    if process.pass_logs_on(LOG_CONFIG, folder, {"vllm": level}):
        os.environ["VLLM_LOGGING_LEVEL"] = level


def keyword_arguments(settings: VllmSettings, events: str, replay: str, *, cpu: bool) -> dict[str, Any]:
    """All arguments of AsyncEngineArgs. `events` and `replay` are the sockets for KV events unless native ones are.

    Raises `EngineUnavailable` naming the invalid argument.
    """
    native_options = parse(settings.options.native)
    worker = settings.worker
    check_agreement(
        "vLLM",
        native_options,
        {
            "--block-size": (worker.block_size, "block_size"),
            "--max-model-len": (worker.max_model_len, "max_model_len"),
        },
    )
    # Prefix caching stays vLLM's default: on, except for models that it would crash or make wrong, as encoders that attend to both sides.
    arguments: dict[str, Any] = {
        # Headwater logs its own; vLLM's would be printed every ten seconds.
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    } | shared_arguments(settings, cpu=cpu)
    # One backend for checking and for compiling. With vLLM's default, "auto", the first guided request of an engine
    # decides what compiles all later ones, whatever each of them was checked with.
    arguments["structured_outputs_config"] = {"backend": "guidance"}
    transfer = transfer_config(settings, cpu=cpu)
    if endpoint := worker.traces.announced("vllm", worker.name).endpoint:
        arguments["otlp_traces_endpoint"] = endpoint
    if transfer is not None:
        from vllm.config.kv_transfer import KVTransferConfig

        arguments["kv_transfer_config"] = KVTransferConfig(**transfer)
    return (
        arguments
        | native_options
        | {
            "model": worker.model,
            "kv_events_config": _kv_events(native_options.get("kv_events_config"), events, replay),
        }
    )


def shared_arguments(settings: VllmSettings, *, cpu: bool) -> dict[str, Any]:
    """Return what every process of an engine must be started with, its headless ranks and further nodes too; native arguments go first."""
    worker = settings.worker
    arguments: dict[str, Any] = {}
    if worker.max_model_len:
        arguments["max_model_len"] = worker.max_model_len
    if cpu:
        # Most CPUs have no bf16 arithmetic and emulate it at a third of float32's speed.
        arguments["dtype"] = "float32"
    if worker.block_size or cpu:
        arguments["block_size"] = worker.block_size or CPU_BLOCK_SIZE
    if cpu:
        arguments["enforce_eager"] = True
        arguments["kv_cache_memory_bytes"] = CPU_KV_CACHE_MIB * MIB
    return arguments


def _kv_events(native_config: Any, events: str, replay: str) -> Any:
    """The configuration of KV events: the default, or a native one that publishes them."""
    from vllm.config.kv_events import KVEventsConfig

    if native_config is None:
        return KVEventsConfig(
            enable_kv_cache_events=True, publisher="zmq", endpoint=events, replay_endpoint=replay
        )
    if not native_config.enable_kv_cache_events or native_config.publisher != "zmq":
        raise EngineUnavailable(
            '--kv-events-config disables KV events, which routing requires: set "enable_kv_cache_events": true '
            'and "publisher": "zmq", or omit it'
        )
    if native_config.replay_endpoint is None:
        native_config.replay_endpoint = replay
    return native_config


# Pooling models: their tasks, and the parameters that they need.

POOLING: Final = ("embed", "classify", "score", "token_embed", "token_classify")
"""Tasks of vLLM's pooling models that return vectors."""


class VllmPooling(NamedTuple):
    """`tasks` of `Engine.embed` that the model supports, `score_task` is vLLM's name of the task that scores pairs.

    `segmented`: its tokens have types, which distinguish the texts of a pair.
    """

    tasks: tuple[str, ...] = ()
    score_task: str = "score"
    segmented: bool = False

    def params(self, task: str, dimensions: int, segment: int) -> dict[str, Any]:
        """The arguments of vLLM's `PoolingParams` for a prompt whose second text starts at `segment`, 0: it has none. Raises `RequestRejected`."""
        if task not in self.tasks:
            raise RequestRejected(
                f"{task!r} is not supported by this model; supported: {', '.join(self.tasks)}"
            )
        params: dict[str, Any] = {"task": self.score_task if task == "score" else task}
        if dimensions:
            params["dimensions"] = dimensions
        if self.segmented and segment:
            # What vLLM's own API makes of a tokenizer's type ids: the position of the first 1.
            params["extra_kwargs"] = {"compressed_token_type_ids": segment}
        return params


def pooling_of(tasks: Sequence[str], config: Any) -> VllmPooling:
    """The tasks of the model with these tasks of vLLM and this configuration of Hugging Face.

    A classifier with one class scores pairs: the task that vLLM had for it is `classify` since.
    """
    supported = [task for task in POOLING if task in tasks]
    score_task = "score" if "score" in tasks else "classify"
    if "score" not in supported and "classify" in supported and getattr(config, "num_labels", 0) == 1:
        supported.append("score")
    segmented = int(getattr(config, "type_vocab_size", 0) or 0) > 1
    return VllmPooling(tuple(supported), score_task, segmented)


# Capabilities of a started vLLM, from its actual configuration.

GENERATES: frozenset[Capability] = frozenset(
    {"generate", "logprobs", "prompt_logprobs", "allowed_tokens", "seed", "cache_salt"}
)

POSSIBLE: Final = TOKEN_CAPABILITIES - {"split_only"}
"""What an engine can do with some arguments."""


def capabilities(
    config: Any, tasks: tuple[str, ...], processors: Mapping[str, str], engine: Any
) -> frozenset[Capability]:
    """Capabilities of an AsyncLLM `engine` with this VllmConfig and these supported tasks."""
    supported: set[Capability] = set()
    if "generate" in tasks:
        supported |= GENERATES
        # With speculative decoding vLLM ignores biases and logits processors.
        if getattr(config, "speculative_config", None) is None:
            supported.add("logit_bias")
            if processors:
                supported.add("processors")
        # A grammar is compiled for the tokenizer's vocabulary.
        if not getattr(config.model_config, "skip_tokenizer_init", False):
            supported |= {"guide", "bad_words"}
        if getattr(getattr(config, "reasoning_config", None), "enabled", False):
            supported.add("thinking_budget")
        if can_hand_over(config):
            supported.add("handoff")
    if "transcription" in tasks and config.model_config.hf_config.model_type == "whisper":
        supported |= {"transcription", "logprobs", "allowed_tokens", "seed", "cache_salt"}
    if any(task in POOLING for task in tasks):
        supported |= {"embed", "cache_salt"}
    events = config.kv_events_config
    if config.cache_config.enable_prefix_caching and events and events.enable_kv_cache_events:
        supported |= {"kv_events", "kv_dump", "clear_kv"}
    if config.scheduler_config.policy == "priority":
        supported.add("priority")
    if config.lora_config is not None:
        supported.add("lora")
    if config.model_config.enable_sleep_mode:
        supported.add("sleep")
    if hasattr(engine, "pause_generation"):
        supported.add("pause")
    profiler = getattr(config, "profiler_config", None)
    if profiler and profiler.profiler:
        supported.add("profile")
    return frozenset(supported)


# Validation before anything is loaded. Every error names the flag and the fix. Pure.


def role(worker_role: Role, connector: str, words: Sequence[str]) -> tuple[str, ...]:
    """The connectors of a worker with this role, from `--connector` and its native arguments.

    A prefill or decode worker of vLLM without any gets NIXL.
    """
    if worker_role == "encode":
        # It has no KV.
        return ()
    chosen = handoff.names(connector)
    explicit = has(words, "kv_transfer_config")
    headless = is_follower(words)
    if headless and worker_role != "both":
        raise EngineUnavailable(
            f"--role {worker_role} with {headless}: such a process accepts no requests and has no role; give the role to "
            "its leader"
        )
    if connector and explicit:
        raise EngineUnavailable(
            f"--connector {connector} and --kv-transfer-config both set the connectors: use one of them"
        )
    if (
        explicit
        and worker_role != "both"
        and not handoff.may_hand_over(value(words, "kv_transfer_config") or "")
    ):
        raise EngineUnavailable(
            f"--role {worker_role} with a --kv-transfer-config whose connectors do not hand KV over from prefill to decode: name "
            f"{' or '.join(sorted(handoff.PULLING))} in it, or leave it out for nixl"
        )
    if worker_role == "both" or explicit:
        return chosen
    if not connector:
        return ("nixl",)
    if not handoff.hands_over(chosen):
        able = ", ".join(name for name, entry in handoff.CONNECTORS.items() if entry.hands_over)
        raise EngineUnavailable(
            f"--role {worker_role} with --connector {connector}: none of these hands KV over from prefill to decode; "
            f"add one of {able}, or omit --connector for nixl"
        )
    return chosen


def is_follower(words: Sequence[str]) -> str:
    """The argument that makes this a process without requests of its own, "" without one."""
    if has(words, "headless"):
        return "--headless"
    node = number(words, "node_rank", 0)
    return f"--node-rank {node}" if node else ""


MASTER_PORT: Final = 29501
"""VLLM's default of --master-port."""


def leader(words: Sequence[str]) -> str:
    """Where a follower meets its leader (`host:port`), "" where the arguments do not say."""
    if number(words, "node_rank", 0):
        host = value(words, "master_addr")
        return host_port(host, number(words, "master_port", MASTER_PORT)) if host else ""
    host, port = value(words, "data_parallel_address"), number(words, "data_parallel_rpc_port", 0)
    return host_port(host, port) if host and port else ""


def kv_event_ports(owner: str, endpoint: str, ranks: int, flag: str) -> list[PortRange]:
    """The ports of a native KV event endpoint; none for other sockets than TCP. Rank N adds N to its number."""
    scheme, _, rest = endpoint.partition("://")
    if scheme != "tcp":
        return []
    port = rest.rpartition(":")[2]
    if not port.isdigit():
        raise EngineUnavailable(f"{flag}: {endpoint} has no port number; write it as tcp://*:5557")
    return [PortRange(flag, owner, int(port), ranks)]


def versions(
    worker_role: Role, version: str, model: str, cards: Iterable[ModelCard], live: set[str], *, allow: bool
) -> None:
    """Reject a prefill or decode worker whose vLLM version differs from that of its pool's workers."""
    if worker_role == "both" or allow or not version:
        return
    for card in cards:
        if card.pool != pool_name(model, card.block_size) or card.pool not in live or card.engine != "vllm":
            continue
        if card.engine_version and card.engine_version != version:
            raise EngineUnavailable(
                f"--role {worker_role}: vLLM {version} here, {card.engine_version} in pool {card.pool}, and KV moves "
                f"between equal versions only; install vllm=={card.engine_version}, or start with "
                "--allow mixed-versions and the other role's workers of this version next"
            )


# The installed vLLM, and releases with known vulnerabilities.

RELOADS_WITH_LORA: Final = (0, 32, 0)

VULNERABILITIES: Final = (
    Vulnerability("CVE-2025-32444", (0, 8, 5), "unpickles data from an open port (Mooncake)", refused=True),
    Vulnerability(
        "CVE-2025-47277", (0, 8, 5), "unpickles data from all interfaces (PyNcclPipe)", refused=True
    ),
    Vulnerability("CVE-2025-30202", (0, 8, 5), "publishes its work on all interfaces", refused=True),
    Vulnerability(
        "CVE-2025-48942", (0, 9, 0), "crashes on a request's schema or regular expression", refused=True
    ),
    Vulnerability("CVE-2025-62164", (0, 11, 1), "loads tensors of requests unchecked", refused=True),
    Vulnerability(
        "CVE-2026-22807",
        (0, 14, 0),
        "runs a model repository's code even where that is disabled",
        refused=True,
    ),
    Vulnerability("CVE-2026-22778", (0, 14, 0), "runs code from a video", refused=True),
    Vulnerability(
        "CVE-2026-24779", (0, 14, 1), "fetches addresses outside its allow-list; the edge fetches none"
    ),
    Vulnerability("CVE-2026-34756", (0, 19, 0), "accepts any `n`; the edge limits it"),
)
"""The `refused` ones were fixed before 0.14.0."""

RELEASES: Final = Releases("vLLM", ("vllm", "vllm-cpu"), VULNERABILITIES, "--allow vulnerable")

installed = RELEASES.installed


def on_cpu() -> bool:
    """Is the build for CPUs installed?"""
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return False
    return True


def reloads_weights_with_lora() -> bool:
    """Does this release read its weights again where layers have LoRA adapters? 0.24 does not find them (measured on a GPU)."""
    installed_release = release(installed())
    return installed_release is None or installed_release >= RELOADS_WITH_LORA
