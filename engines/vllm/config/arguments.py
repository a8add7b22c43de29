"""Conversion of Headwater's settings and vLLM's own arguments to the keyword arguments of AsyncEngineArgs.

Where both set a value they must agree. Unset values are vLLM's defaults, except on a CPU, where these are for servers with
hundreds of cores.
"""

import os
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from headwater.engines.embeddings.limits import EMBEDDINGS_MIB
from headwater.engines.engine import EngineUnavailable
from headwater.engines.vllm.config import cli_arguments, connectors
from headwater.schemas.events.fleet import Role

CPU_BLOCK_SIZE = 32
CPU_KV_CACHE_MIB = 512
MIB = 1024 * 1024
_SAME_TYPES = {"float": "float32", "half": "float16"}


class VllmSettings(NamedTuple):
    """Headwater's settings of vLLM; all others are vLLM's defaults. Zero and empty mean: choose for this machine.

    `native` are vLLM's own arguments as words of a command line. `connectors` are short names in order, with their
    options. `metrics`: vLLM's Prometheus metrics are exported. `ranks` is vLLM's data_parallel_size.
    `embeddings_mib` bounds the image embeddings that the worker keeps; with `reads_embeddings` it takes those of encode workers, with
    `accepts_embeddings` those of clients too.
    `processors` are logits processors that requests may use, "module:Class" by name; see
    `headwater.engines.vllm.sampling.arguments`. `overrides` are arguments of AsyncEngineArgs with the highest precedence.
    """

    model: str
    name: str
    worker: str
    block_size: int = 0
    max_model_len: int = 0
    dtype: str = ""
    kv_cache_mib: int = 0
    role: Role = "both"
    native: tuple[str, ...] = ()
    connectors: tuple[str, ...] = ()
    connector_options: Mapping[str, Mapping[str, Any]] = {}
    nixl_host: str = "127.0.0.1"
    nixl_port: int = 0
    metrics: bool = False
    ranks: int = 1
    processors: Mapping[str, str] = {}
    embeddings_mib: int = EMBEDDINGS_MIB
    reads_embeddings: bool = False
    accepts_embeddings: bool = False
    overrides: Mapping[str, Any] = {}


KEPT_MAPPINGS: Final = "UCX_CUDA_IPC_CACHE"
"""UCX keeps mappings of GPU memory of other processes, and so the memory of dead ones: a prefill worker could not start again until its
decode workers had ended."""


def environment(settings: VllmSettings) -> None:
    """Set what vLLM, and UCX below NIXL, read only from the environment. Call before the engine is created."""
    if connectors.hands_over(settings.connectors) or cli_arguments.has(settings.native, "kv_transfer_config"):
        os.environ.setdefault(KEPT_MAPPINGS, "n")
    # In the environment it is in whole GiB, and would override the argument.
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    if settings.nixl_port:
        os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = settings.nixl_host
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(settings.nixl_port)


def keyword_arguments(settings: VllmSettings, events: str, replay: str, *, cpu: bool) -> dict[str, Any]:
    """All arguments of AsyncEngineArgs. `events` and `replay` are the sockets for KV events unless native ones are.

    Raises `EngineUnavailable` naming the invalid argument.
    """
    given = cli_arguments.parse(settings.native)
    _agree(settings, given)
    # Prefix caching stays vLLM's default: on, except for models that it would crash or make wrong, as encoders that attend to both sides.
    arguments: dict[str, Any] = {
        # Headwater logs its own; vLLM's would be printed every ten seconds.
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    } | shared_arguments(settings, cpu=cpu)
    # One backend for checking and for compiling. With vLLM's default, "auto", the first guided request of an engine
    # decides what compiles all later ones, whatever each of them was checked with.
    arguments["structured_outputs_config"] = {"backend": "guidance"}
    transfer = connectors.transfer_config(settings.connectors, settings.connector_options, cpu=cpu)
    if transfer is not None:
        from vllm.config.kv_transfer import KVTransferConfig

        arguments["kv_transfer_config"] = KVTransferConfig(**transfer)
    return (
        arguments
        | given
        | {
            "model": settings.model,
            "kv_events_config": _kv_events(given.get("kv_events_config"), events, replay),
        }
    )


def shared_arguments(settings: VllmSettings, *, cpu: bool) -> dict[str, Any]:
    """What every process of an engine must be started with, its headless ranks and further nodes too; native arguments go first."""
    arguments: dict[str, Any] = {}
    if settings.max_model_len:
        arguments["max_model_len"] = settings.max_model_len
    if settings.dtype or cpu:
        # Most CPUs have no bf16 arithmetic and emulate it at a third of float32's speed.
        arguments["dtype"] = settings.dtype or "float32"
    if settings.block_size or cpu:
        arguments["block_size"] = settings.block_size or CPU_BLOCK_SIZE
    if cpu:
        arguments["enforce_eager"] = True
    if settings.kv_cache_mib or cpu:
        arguments["kv_cache_memory_bytes"] = (settings.kv_cache_mib or CPU_KV_CACHE_MIB) * MIB
    return arguments


def _agree(settings: VllmSettings, given: Mapping[str, Any]) -> None:
    """Raise if a setting and the corresponding native argument differ."""
    pairs = (
        ("--block-size", settings.block_size, "block_size", 1),
        ("--max-model-len", settings.max_model_len, "max_model_len", 1),
        ("--dtype", settings.dtype, "dtype", 1),
        ("--kv-cache-mib", settings.kv_cache_mib, "kv_cache_memory_bytes", MIB),
    )
    for flag, ours, name, unit in pairs:
        theirs = given.get(name)
        if not ours or theirs is None:
            continue
        wanted = ours * unit if isinstance(ours, int) else _SAME_TYPES.get(ours, ours)
        if wanted != _SAME_TYPES.get(theirs, theirs):
            raise EngineUnavailable(
                f"{flag} {ours} and, among vLLM's own arguments, --{name.replace('_', '-')} {theirs} disagree: "
                "omit one"
            )


def _kv_events(theirs: Any, events: str, replay: str) -> Any:
    """The configuration of KV events: the default, or a native one that publishes them."""
    from vllm.config.kv_events import KVEventsConfig

    if theirs is None:
        return KVEventsConfig(
            enable_kv_cache_events=True, publisher="zmq", endpoint=events, replay_endpoint=replay
        )
    if not theirs.enable_kv_cache_events or theirs.publisher != "zmq":
        raise EngineUnavailable(
            '--kv-events-config disables KV events, which routing requires: set "enable_kv_cache_events": true '
            'and "publisher": "zmq", or omit it'
        )
    if theirs.replay_endpoint is None:
        theirs.replay_endpoint = replay
    return theirs
