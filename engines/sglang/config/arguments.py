"""Conversion of Headwater's settings and SGLang's own arguments to the keyword arguments of its `Engine`.

Where both set a value they must agree. Unset values are SGLang's defaults, except those that the adapter relies on, and
on a CPU, where SGLang's are for a GPU.
"""

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from headwater.engines.embeddings.limits import EMBEDDINGS_MIB
from headwater.engines.engine import EngineUnavailable
from headwater.engines.sglang.config import disaggregation
from headwater.schemas.events.fleet import Role

CPU_PAGE_SIZE: Final = 32
"""As vLLM's blocks on a CPU: workers of both engines may then serve one pool."""

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


class SglangSettings(NamedTuple):
    """Headwater's settings of SGLang; all others are SGLang's defaults. Zero and empty mean: choose for this machine.

    `native` are SGLang's own arguments as words of a command line. `metrics`: SGLang's Prometheus metrics are exported.
    `ranks` is SGLang's dp_size. `processors` are logits processors that requests may use, "module:Class" by name.
    With `reads_embeddings` it takes those of encode workers; `embeddings_mib` bounds the image embeddings that the worker keeps.
    `overrides` are arguments of `Engine` with the highest precedence.
    """

    model: str
    name: str
    worker: str
    block_size: int = 0
    max_model_len: int = 0
    role: Role = "both"
    native: tuple[str, ...] = ()
    metrics: bool = False
    ranks: int = 1
    processors: Mapping[str, str] = {}
    overrides: Mapping[str, Any] = {}
    host: str = "127.0.0.1"
    """Where other workers reach this one, if it prefills or decodes only."""
    embeddings_mib: int = EMBEDDINGS_MIB
    reads_embeddings: bool = False
    bootstrap_port: int = 0
    """Of the server on which the legs of its prompts meet; 0: a free one."""


def keyword_arguments(
    settings: SglangSettings, given: Mapping[str, Any], events: str, replay: str, *, cpu: bool
) -> dict[str, Any]:
    """All arguments of `Engine`. `given` are the parsed native ones; `events` and `replay` the sockets for KV events.

    Raises `EngineUnavailable` naming the invalid argument.
    """
    _reject_owned(given)
    _agree(settings, given)
    _check_nodes(settings, given)
    mode = disaggregation.mode_of(settings.role, given)
    arguments: dict[str, Any] = {"page_size": PAGE_SIZE, **(CPU if cpu else {})}
    arguments |= {
        "log_level": "warning",
        # New tokens only: otherwise each chunk has all tokens of its request so far.
        "incremental_streaming_output": True,
        # Left to the model, JSON may be white space without end.
        "constrained_json_disable_any_whitespace": True,
        # The adapter sends no request before it is ready.
        "skip_server_warmup": True,
        # It rejects what does not fit: nothing is cut off silently.
        "allow_auto_truncate": False,
    }
    arguments |= disaggregation.arguments(mode, settings.host, settings.bootstrap_port, cpu=cpu)
    if settings.block_size:
        arguments["page_size"] = settings.block_size
    if settings.max_model_len:
        arguments["context_length"] = settings.max_model_len
    if settings.ranks > 1:
        arguments["dp_size"] = settings.ranks
    if settings.reads_embeddings:
        # Its only effect here: a batch may have requests with embeddings next to others with pixels, on which the scheduler would end.
        arguments["enable_adaptive_dispatch_to_encoder"] = True
    if settings.metrics:
        arguments["enable_metrics"] = True
    if settings.processors:
        arguments["enable_custom_logit_processor"] = True
    if given.get("enable_priority_scheduling"):
        # As in vLLM and in the API: a lower number is more urgent.
        arguments["schedule_low_priority_values_first"] = True
    if given.get("enable_memory_saver"):
        # Without it the weights of an engine that slept are zeros, and no error says so.
        arguments["enable_weights_cpu_backup"] = True
    return (
        arguments
        | dict(given)
        | {"model_path": settings.model, "kv_events_config": _kv_events(given, events, replay)}
        | dict(settings.overrides)
    )


def _reject_owned(given: Mapping[str, Any]) -> None:
    for name, reason in OWNED.items():
        if name in given:
            raise EngineUnavailable(f"--{name.replace('_', '-')} is not supported here: {reason}; omit it")


def _check_nodes(settings: SglangSettings, given: Mapping[str, Any]) -> None:
    """Raise for what an engine of several nodes cannot do here."""
    nodes = int(given.get("nnodes") or 1)
    if nodes == 1:
        return
    if not given.get("dist_init_addr"):
        raise EngineUnavailable(
            f"--nnodes {nodes} without --dist-init-addr: give all nodes HOST:PORT of the first one, with a free port"
        )
    if settings.ranks > 1:
        raise EngineUnavailable(
            f"--dp-size {settings.ranks} with --nnodes {nodes} is not implemented, since each rank publishes its KV events "
            "on its own node: start one worker for each rank"
        )
    if settings.role != "both":
        raise EngineUnavailable(
            f"--role {settings.role} with --nnodes {nodes} is not implemented: prefill and decode workers have one node each"
        )


def _agree(settings: SglangSettings, given: Mapping[str, Any]) -> None:
    """Raise if a setting and the corresponding native argument differ."""
    pairs = (
        ("--block-size", settings.block_size, "page_size"),
        ("--max-model-len", settings.max_model_len, "context_length"),
    )
    for flag, ours, name in pairs:
        theirs = given.get(name)
        if ours and theirs is not None and ours != theirs:
            raise EngineUnavailable(
                f"{flag} {ours} and, among SGLang's own arguments, --{name.replace('_', '-')} {theirs} disagree: "
                "omit one"
            )


def _kv_events(given: Mapping[str, Any], events: str, replay: str) -> str:
    """The configuration of KV events: the default, or a native one that publishes them."""
    text = given.get("kv_events_config")
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
