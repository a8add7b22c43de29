"""Fields that only we may give to an engine: anything of the kind in a client's request is taken out and counted.

With a hand-off of its own a client could read another client's KV; with a rank, an adapter's path or a request id it
could choose where and as whom it runs; some engines even unpickle code from such fields. What reaches an engine is
a `GenerateRequest` made of fields that are read by name, so leaving a name out of the wire types takes it out. This
module does what remains: it cleans the free-form values that are passed on (`without_ours`) and makes attempts visible.
"""

from typing import Any, Final

import msgspec
import structlog

from headwater.actors import metrics

EXACT: Final = frozenset(
    {
        # Hand-offs and transfers, as vLLM, SGLang, TensorRT-LLM and we name them.
        "kv_transfer_params", "ec_transfer_params", "disaggregated_params", "do_remote_prefill",
        "do_remote_decode", "remote_block_ids", "remote_engine_id", "remote_host", "remote_port",
        "remote_request_id", "handoff", "leg", "kv_hints", "kv_cache_report_mode", "mm_hashes",
        "mm_content_hashes", "multi_modal_uuids",
        # Code, paths and arguments of the engine's own functions.
        "custom_logit_processor", "custom_params", "vllm_xargs", "extra_args", "mm_processor_kwargs",
        "media_io_kwargs", "mm_payload", "lora_path", "lora_request",
        # Where and as whom a request runs.
        "rid", "request_id", "session_id", "session_params", "data_parallel_rank", "routed_dp_rank",
        "disagg_prefill_dp_rank", "external_trace_header",
        # The engine's insides as an answer.
        "return_hidden_states", "return_routed_experts", "routed_experts_start_len",
        "routed_experts_prompt_start", "return_mm_kwargs",
    }
)  # fmt: skip
PREFIXES: Final = ("bootstrap_", "kv_transfer", "ec_transfer", "disagg_")

DATA: Final = frozenset(
    {"metadata", "tools", "functions", "tool_calls", "response_format", "guided_json", "structured_outputs"}
)
"""Fields whose values are data: names inside of them are the client's own."""

DEPTH_MAX: Final = 32
_SIGNS: Final = tuple(f'"{name}'.encode() for name in sorted({*EXACT, *PREFIXES}))
_ESCAPES: Final = b"\\u00"

_log = structlog.get_logger("headwater.edge")


def is_ours(name: str) -> bool:
    """May only we set a field of this name?"""
    return name in EXACT or name.startswith(PREFIXES)


def without_ours(value: Any) -> Any:
    """JSON types without fields of ours, at every depth. The value must not be deeper than Python can walk."""
    if isinstance(value, dict):
        return {name: without_ours(inner) for name, inner in value.items() if not is_ours(name)}
    if isinstance(value, list):
        return [without_ours(inner) for inner in value]
    return value


class Attempts:
    """Counts fields of ours in requests, and says so once for each name."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def note(self, body: bytes) -> frozenset[str]:
        """The fields of ours that a request's body has, counted. What is no JSON has none."""
        # Looking for the names in the bytes costs a few microseconds; only a hit is read in full.
        if _ESCAPES not in body and not any(sign in body for sign in _SIGNS):
            return frozenset()
        try:
            document = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return frozenset()
        found: set[str] = set()
        _find(document, found, 0)
        for name in found:
            metrics.STRIPPED.labels(name).inc()
            if name not in self._said:
                self._said.add(name)
                _log.warning(
                    "field_stripped", field=name, why="only the fleet itself sets it; a client's is ignored"
                )
        return frozenset(found)


def _find(value: Any, found: set[str], depth: int) -> None:
    if depth > DEPTH_MAX:
        return
    if isinstance(value, dict):
        for name, inner in value.items():
            if is_ours(name):
                # A label of the metric must not be the client's to choose.
                found.add(name if name in EXACT else next(p + "*" for p in PREFIXES if name.startswith(p)))
            elif name not in DATA:
                _find(inner, found, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            _find(inner, found, depth + 1)
