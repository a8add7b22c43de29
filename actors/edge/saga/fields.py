"""Request fields that the edge does not serve (reserved ones are stripped and counted, unsupported ones refused), and a table of all fields.

Reserved fields are those that only the fleet itself may give to an engine. With a hand-off of its own a client could
read another client's KV; with a rank, an adapter's path or a request id it could choose where and as whom it runs; some
engines even unpickle code from such fields. An engine gets a `GenerateRequest`, which is built from fields that are read
by name, so a field that is not read is stripped: `ReservedFields` reads these only to detect them. Free-form values
that are passed on are cleaned by `without_reserved`.

Unsupported fields would change the answer: they are refused by name rather than silently dropped.
"""

from collections.abc import Mapping
from operator import attrgetter
from typing import Any, Final, Literal, NamedTuple

import msgspec
import structlog

from headwater.actors import metrics
from headwater.actors.http.errors import bad_request

NOT_SENT: Final = msgspec.Raw()


class ReservedFields(msgspec.Struct, kw_only=True):
    """The fields, undecoded. OpenAI's client unpacks `extra_body`: a request that contains it as such has it ignored."""

    extra_body: Any = None
    # Hand-offs and transfers, as vLLM, SGLang, TensorRT-LLM and Headwater name them.
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
    data_parallel_rank: msgspec.Raw = NOT_SENT
    routed_dp_rank: msgspec.Raw = NOT_SENT
    disagg_prefill_dp_rank: msgspec.Raw = NOT_SENT
    external_trace_header: msgspec.Raw = NOT_SENT
    # Internal state of the engine.
    return_hidden_states: msgspec.Raw = NOT_SENT
    return_routed_experts: msgspec.Raw = NOT_SENT
    routed_experts_start_len: msgspec.Raw = NOT_SENT
    routed_experts_prompt_start: msgspec.Raw = NOT_SENT
    return_mm_kwargs: msgspec.Raw = NOT_SENT


NAMES: Final = frozenset(ReservedFields.__struct_fields__) - {"extra_body"}
NAMES_IN_ORDER: Final = tuple(sorted(NAMES))
_NONE_RESERVED: Final = (NOT_SENT,) * len(NAMES_IN_ORDER)
_reserved_of: Final = attrgetter(*NAMES_IN_ORDER)

PREFIXES: Final = ("bootstrap_", "kv_transfer", "ec_transfer", "disagg_")
"""Fields with these prefixes are reserved too, whichever release of an engine introduces them."""

DEPTH_MAX: Final = 32

_log = structlog.get_logger("headwater.edge")


def is_reserved(name: str) -> bool:
    """Return whether only the fleet may set a field of this name."""
    return name in NAMES or name.startswith(PREFIXES)


def without_reserved(value: Any) -> Any:
    """JSON types without reserved fields, at every depth. The value must not be deeper than Python can recurse."""
    if isinstance(value, dict):
        return {name: without_reserved(inner) for name, inner in value.items() if not is_reserved(name)}
    if isinstance(value, list):
        return [without_reserved(inner) for inner in value]
    return value


_NOTHING: Final[tuple[Any, ...]] = (None,)
_OFF: Final[tuple[Any, ...]] = (None, False)
_EMPTY: Final[tuple[Any, ...]] = (None, [])

NEUTRAL_VALUES: Final[dict[str, tuple[Any, ...]]] = {
    "chat_template": _NOTHING,
    "prompt_embeds": _NOTHING,
    "input_embeds": _NOTHING,
    "repetition_detection": _NOTHING,
    "guided_whitespace_pattern": _NOTHING,
    "use_beam_search": _OFF,
    "watermarking": _OFF,
    "length_penalty": (None, 1),
    "logprob_token_ids": _EMPTY,
    "functions": _EMPTY,
    "function_call": (None, "none", "auto"),
    "audio": _NOTHING,
    "modalities": (None, [], ["text"]),
    "web_search_options": _NOTHING,
    "moderation": _NOTHING,
    # SGLang's: a pickled class, and a conversation that the engine keeps and puts before the prompt.
    "custom_logit_processor": _NOTHING,
    "session_params": _NOTHING,
}
"""Values that mean the same as leaving the field out."""

_NONE_GIVEN: Final = (None,) * len(NEUTRAL_VALUES)
_unsupported_of: Final = attrgetter(*NEUTRAL_VALUES)

_HINTS: Final = {
    "chat_template": "the operator sets it (--chat-template)",
    "functions": "use tools",
    "custom_logit_processor": "name one of the model's own in logits_processors",
    "session_params": "send the whole conversation: what an engine has cached of it is found again",
}


class UnsupportedFields(ReservedFields, kw_only=True):
    """Fields that are refused unless they have one of their `NEUTRAL_VALUES`."""

    chat_template: Any = None
    prompt_embeds: Any = None
    input_embeds: Any = None
    repetition_detection: Any = None
    guided_whitespace_pattern: Any = None
    use_beam_search: Any = None
    watermarking: Any = None
    length_penalty: Any = None
    logprob_token_ids: Any = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    modalities: Any = None
    web_search_options: Any = None
    moderation: Any = None
    custom_logit_processor: Any = None
    session_params: Any = None

    def refuse_unsupported(self) -> None:
        """Raises `ApiError` 400 for the first field that would change the answer. Subclasses refuse more."""
        values = _unsupported_of(self)
        if values == _NONE_GIVEN:
            return
        for name, value in zip(NEUTRAL_VALUES, values, strict=True):
            if value is not None and not any(value == neutral for neutral in NEUTRAL_VALUES[name]):
                hint = _HINTS.get(name, "leave it out")
                raise bad_request(f"{name} is not supported by this release; {hint}.", param=name)


class FieldChecker:
    """Checks the fields of every request; logs each reserved name once."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def check(self, request: UnsupportedFields, *passed_on: Any) -> None:
        """Count reserved fields, also in values that are passed on. Raises `ApiError` 400 for unsupported ones."""
        self.count(request, *passed_on)
        request.refuse_unsupported()

    def count(self, request: ReservedFields, *values: Any) -> frozenset[str]:
        """The reserved fields that a request has, at its top or in one of these values of it; counted."""
        values_of_reserved = _reserved_of(request)
        if values_of_reserved == _NONE_RESERVED and request.extra_body is None and not any(values):
            return frozenset()
        found = {
            name
            for name, value in zip(NAMES_IN_ORDER, values_of_reserved, strict=True)
            if value is not NOT_SENT
        }
        for value in (request.extra_body, *values):
            _find(value, found, 0)
        for name in found:
            metrics.STRIPPED.labels(name).inc()
            if name not in self._logged:
                self._logged.add(name)
                _log.warning(
                    "field_stripped", field=name, why="reserved for the fleet; a client's value is ignored"
                )
        return frozenset(found)


def _find(value: Any, found: set[str], depth: int) -> None:
    if depth > DEPTH_MAX:
        return
    if isinstance(value, dict):
        for name, inner in value.items():
            if is_reserved(name):
                # Clients must not be able to choose a label of the metric.
                found.add(name if name in NAMES else next(p + "*" for p in PREFIXES if name.startswith(p)))
            else:
                _find(inner, found, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            _find(inner, found, depth + 1)


# What becomes of each field: served, ignored, rejected or removed. The reference is made from it.

FieldStatus = Literal["served", "ignored", "rejected", "removed"]

NOTHING: Final[Mapping[str, str]] = {}


class ApiEndpoint(NamedTuple):
    """One endpoint with a body, in JSON or as a form (`content`). `ignored` are known fields without effect here, each with the reason.

    `rejected` are fields of this endpoint's own that are refused: their accepted values, None for absent.
    """

    method: str
    path: str
    summary: str
    body: type[msgspec.Struct]
    ignored: Mapping[str, str] = NOTHING
    rejected: Mapping[str, tuple[Any, ...]] = {}
    body_required: bool = True
    content: str = "application/json"


def statuses(endpoint: ApiEndpoint) -> dict[str, tuple[FieldStatus, str]]:
    """Status of each known field of a request, with a remark, in the order of its type."""
    found: dict[str, tuple[FieldStatus, str]] = {}
    rejected = dict(endpoint.rejected)
    if issubclass(endpoint.body, UnsupportedFields):
        rejected |= NEUTRAL_VALUES
    for field in msgspec.structs.fields(endpoint.body):
        name = field.encode_name
        if name in NAMES or name == "extra_body":
            found[name] = ("removed", "only the fleet may set it")
        elif name in rejected:
            found[name] = ("rejected", _accepted(rejected[name]))
        else:
            found[name] = ("served", "")
    for name, reason in endpoint.ignored.items():
        found[name] = ("ignored", reason)
    order: Final = ("served", "ignored", "rejected", "removed")
    return dict(sorted(found.items(), key=lambda item: order.index(item[1][0])))


def _accepted(values: tuple[Any, ...]) -> str:
    names = ["absent" if value is None else msgspec.json.encode(value).decode() for value in values]
    return "unless " + " or ".join(names)
