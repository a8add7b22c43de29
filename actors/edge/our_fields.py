"""Fields that only we may give to an engine: anything of the kind in a client's request is taken out and counted.

With a hand-off of its own a client could read another client's KV; with a rank, an adapter's path or a request id it
could choose where and as whom it runs; some engines even unpickle code from such fields. What reaches an engine is
a `GenerateRequest` made of fields that are read by name, so not reading a name takes it out: `Ours` reads these only
to see that they were there. The free-form values that are passed on are cleaned by `without_ours`.
"""

from typing import Any, Final

import msgspec
import structlog

from headwater.actors import metrics

NOT_SENT: Final = msgspec.Raw()


class Ours(msgspec.Struct, kw_only=True):
    """The fields, unread. `extra_body` belongs to OpenAI's client, which unpacks it: sent as such it is ignored."""

    extra_body: Any = None
    # Hand-offs and transfers, as vLLM, SGLang, TensorRT-LLM and we name them.
    kv_transfer_params: msgspec.Raw = NOT_SENT
    ec_transfer_params: msgspec.Raw = NOT_SENT
    disaggregated_params: msgspec.Raw = NOT_SENT
    do_remote_prefill: msgspec.Raw = NOT_SENT
    do_remote_decode: msgspec.Raw = NOT_SENT
    remote_block_ids: msgspec.Raw = NOT_SENT
    remote_engine_id: msgspec.Raw = NOT_SENT
    remote_host: msgspec.Raw = NOT_SENT
    remote_port: msgspec.Raw = NOT_SENT
    remote_request_id: msgspec.Raw = NOT_SENT
    handoff: msgspec.Raw = NOT_SENT
    leg: msgspec.Raw = NOT_SENT
    kv_hints: msgspec.Raw = NOT_SENT
    kv_cache_report_mode: msgspec.Raw = NOT_SENT
    mm_hashes: msgspec.Raw = NOT_SENT
    mm_content_hashes: msgspec.Raw = NOT_SENT
    multi_modal_uuids: msgspec.Raw = NOT_SENT
    bootstrap_host: msgspec.Raw = NOT_SENT
    bootstrap_port: msgspec.Raw = NOT_SENT
    bootstrap_room: msgspec.Raw = NOT_SENT
    bootstrap_pair_key: msgspec.Raw = NOT_SENT
    nvext: msgspec.Raw = NOT_SENT
    # Code, paths and arguments of the engine's own functions.
    custom_logit_processor: msgspec.Raw = NOT_SENT
    custom_params: msgspec.Raw = NOT_SENT
    vllm_xargs: msgspec.Raw = NOT_SENT
    extra_args: msgspec.Raw = NOT_SENT
    mm_processor_kwargs: msgspec.Raw = NOT_SENT
    media_io_kwargs: msgspec.Raw = NOT_SENT
    mm_payload: msgspec.Raw = NOT_SENT
    lora_path: msgspec.Raw = NOT_SENT
    lora_request: msgspec.Raw = NOT_SENT
    # Where and as whom a request runs.
    rid: msgspec.Raw = NOT_SENT
    request_id: msgspec.Raw = NOT_SENT
    session_id: msgspec.Raw = NOT_SENT
    session_params: msgspec.Raw = NOT_SENT
    data_parallel_rank: msgspec.Raw = NOT_SENT
    routed_dp_rank: msgspec.Raw = NOT_SENT
    disagg_prefill_dp_rank: msgspec.Raw = NOT_SENT
    external_trace_header: msgspec.Raw = NOT_SENT
    # The engine's insides as an answer.
    return_hidden_states: msgspec.Raw = NOT_SENT
    return_routed_experts: msgspec.Raw = NOT_SENT
    routed_experts_start_len: msgspec.Raw = NOT_SENT
    routed_experts_prompt_start: msgspec.Raw = NOT_SENT
    return_mm_kwargs: msgspec.Raw = NOT_SENT


NAMES: Final = frozenset(Ours.__struct_fields__) - {"extra_body"}
PREFIXES: Final = ("bootstrap_", "kv_transfer", "ec_transfer", "disagg_")
"""Fields that begin so are of the kind too, in whatever release of an engine they come."""

DEPTH_MAX: Final = 32

_log = structlog.get_logger("headwater.edge")


def is_ours(name: str) -> bool:
    """May only we set a field of this name?"""
    return name in NAMES or name.startswith(PREFIXES)


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

    def note(self, request: Ours, *values: Any) -> frozenset[str]:
        """The fields of ours that a request has, at its top or in one of these values of it; counted."""
        found = {name for name in NAMES if getattr(request, name) is not NOT_SENT}
        for value in (request.extra_body, *values):
            _find(value, found, 0)
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
                found.add(name if name in NAMES else next(p + "*" for p in PREFIXES if name.startswith(p)))
            else:
                _find(inner, found, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            _find(inner, found, depth + 1)
