"""Request fields that the edge does not serve (reserved ones are stripped and counted, unsupported ones refused), and a table of all fields.

Reserved fields are those that only the fleet itself may give to an engine. With a hand-off of its own a client could
read another client's KV; with a rank, an adapter's path or a request id it could choose where and as whom it runs; some
engines even unpickle code from such fields. An engine gets a `GenerateRequest`, which is built from fields that are read
by name, so a field that is not read is stripped: `ReservedFields` reads these only to detect them. Free-form values
that are passed on are cleaned by `without_reserved`.

Unsupported fields would change the answer: they are refused by name rather than silently dropped.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, Final, Literal, NamedTuple

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


# What becomes of each field stands in the annotation of its type: bounds are msgspec's, all else is a rule. Checks, the OpenAPI
# document and the reference are made from the types.

FieldStatus = Literal["served", "ignored", "rejected", "removed"]

_NOT_HERE: Final = "{field} is not supported by this release"
NO_EFFECT: Final = "without effect here"
NOT_SUPPORTED: Final = f"{_NOT_HERE}; leave it out."


@dataclass(frozen=True, eq=False, slots=True)
class FieldRule:
    """What becomes of a field, in the metadata of its annotation; or of a part of it: `part` is such as `.effort`.

    A rejected field is accepted in a value that changes nothing: null, its default, or one of `accepted`; of a part `.*`, which stands
    for every part of an object, only in null. `says` is the error, with `{field}` and `{value}`; empty for the usual one.
    `checked`: by `refuse_rejected`. Rules are not compared: `Annotated` would take one that accepts 1 for one that accepts true.
    """

    status: FieldStatus
    remark: str = ""
    part: str = ""
    accepted: tuple[Any, ...] = ()
    says: str = ""
    checked: bool = True

    @property
    def is_whole(self) -> bool:
        """Return whether the rule is about the whole field."""
        return self.part in ("", ".*")


def served(remark: str, part: str = "") -> FieldRule:
    """A field with something to say about it; without a rule a field is served, too."""
    return FieldRule("served", remark, part)


def ignored(reason: str = NO_EFFECT, part: str = "") -> FieldRule:
    """A field that is accepted without effect."""
    return FieldRule("ignored", reason, part)


def rejected(*accepted: Any, reason: str = "", part: str = "", says: str = "") -> FieldRule:
    """A field that would change the answer, unless it has one of these values."""
    if reason and not says:
        says = f"{{field}} is not supported: {reason}."
    return FieldRule("rejected", reason, part, accepted, says)


def refused_apart(remark: str, part: str) -> FieldRule:
    """A part that is refused where it is read."""
    return FieldRule("rejected", remark, part, checked=False)


class UnsupportedFields(ReservedFields, kw_only=True):
    """Fields of other servers that would change the answer."""

    chat_template: Annotated[Any, rejected(says=f"{_NOT_HERE}; the operator sets it (--chat-template).")] = (
        None
    )
    prompt_embeds: Annotated[Any, rejected()] = None
    input_embeds: Annotated[Any, rejected()] = None
    repetition_detection: Annotated[Any, rejected()] = None
    guided_whitespace_pattern: Annotated[Any, rejected()] = None
    use_beam_search: Annotated[Any, rejected(False)] = None
    watermarking: Annotated[Any, rejected(False)] = None
    length_penalty: Annotated[Any, rejected(1)] = None
    logprob_token_ids: Annotated[Any, rejected([])] = None
    functions: Annotated[Any, rejected([], says=f"{_NOT_HERE}; use tools.")] = None
    function_call: Annotated[Any, rejected("none", "auto")] = None
    audio: Annotated[Any, rejected()] = None
    modalities: Annotated[Any, rejected([], ["text"])] = None
    web_search_options: Annotated[Any, rejected()] = None
    moderation: Annotated[Any, rejected()] = None
    # SGLang's: a pickled class, and a conversation that the engine keeps and puts before the prompt.
    custom_logit_processor: Annotated[
        Any, rejected(says=f"{_NOT_HERE}; name one of the model's own in logits_processors.")
    ] = None
    session_params: Annotated[
        Any,
        rejected(
            says=f"{_NOT_HERE}; send the whole conversation: what an engine has cached of it is found again."
        ),
    ] = None

    def refuse_unsupported(self) -> None:
        """Raises `ApiError` 400 for the first field that would change the answer. Subclasses refuse more."""
        refuse_rejected(self)


class FieldRow(NamedTuple):
    """One field of an endpoint, or a part of it, and what becomes of it; `rule` is that of its annotation."""

    field: str
    name: str
    rule: FieldRule

    @property
    def status(self) -> FieldStatus:
        """What becomes of it."""
        return self.rule.status

    @property
    def remark(self) -> str:
        """The reason, and what is accepted of a rejected field."""
        if not (self.status == "rejected" and self.rule.checked):
            return self.rule.remark
        values = ("absent", *(msgspec.json.encode(value).decode() for value in self.rule.accepted))
        return "; ".join(filter(None, ("unless " + " or ".join(values), self.rule.remark)))


_ORDER: Final[tuple[FieldStatus, ...]] = ("served", "ignored", "rejected", "removed")
_SERVED: Final = FieldRule("served")
_REMOVED: Final = FieldRule("removed", "only the fleet may set it")


@cache
def field_rows(body: type[msgspec.Struct]) -> tuple[FieldRow, ...]:
    """Each known field of a request by its status, in the order of its type; fields that are only ignored are in its `IGNORED`."""
    rows = []
    for field in msgspec.structs.fields(body):
        name = field.encode_name
        rules = [rule for rule in getattr(field.type, "__metadata__", ()) if isinstance(rule, FieldRule)]
        if name in NAMES or name == "extra_body":
            rules = [_REMOVED]
        elif not any(rule.is_whole for rule in rules):
            rules.insert(0, _SERVED)
        rows += [FieldRow(name if rule.is_whole else name + rule.part, field.name, rule) for rule in rules]
    left_out: Mapping[str, str] = getattr(body, "IGNORED", {})
    rows += [FieldRow(name, "", ignored(reason)) for name, reason in left_out.items()]
    return tuple(sorted(rows, key=lambda row: _ORDER.index(row.status)))


class _Rejections(NamedTuple):
    """The rejected fields of a body: read all at once, since hardly any request has one."""

    rows: tuple[FieldRow, ...]
    values_of: Callable[[Any], tuple[Any, ...]]
    defaults: tuple[Any, ...]


@cache
def _rejections(body: type[msgspec.Struct]) -> _Rejections:
    defaults = {
        field.name: field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        for field in msgspec.structs.fields(body)
    }
    rows = tuple(row for row in field_rows(body) if row.status == "rejected" and row.rule.checked)
    names = [row.name for row in rows]
    return _Rejections(rows, attrgetter(*names), tuple(defaults[name] for name in names))


def refuse_rejected(request: msgspec.Struct, otherwise: str = NOT_SUPPORTED, code: str | None = None) -> None:
    """Raises `ApiError` 400 for the first field that would change the answer; `otherwise` is the error of rules that say none."""
    rows, values_of, defaults = _rejections(type(request))
    values = values_of(request)
    if values == defaults:
        return
    for row, value, default in zip(rows, values, defaults, strict=True):
        if value is default:
            continue
        rule = row.rule
        for field, part in _parts(row, value):
            if part is None or part == default or any(part == accepted for accepted in rule.accepted):
                continue
            message = (rule.says or otherwise).format(field=field, value=part)
            raise bad_request(message, param=field, code=code)


def _parts(row: FieldRow, value: Any) -> Iterable[tuple[str, Any]]:
    """What a rule is about, of the value of its field."""
    if not row.rule.part:
        return ((row.field, value),)
    if row.rule.part == ".*":
        return ((f"{row.field}.{name[:64]}", inner) for name, inner in (value or {}).items())
    name = row.rule.part.removeprefix(".")
    return ((row.field, value.get(name) if isinstance(value, dict) else getattr(value, name, None)),)


class ApiEndpoint(NamedTuple):
    """One endpoint with a body, in JSON or as a form (`content`)."""

    method: str
    path: str
    summary: str
    body: type[msgspec.Struct]
    body_required: bool = True
    content: str = "application/json"


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
        reserved = {
            name
            for name, value in zip(NAMES_IN_ORDER, values_of_reserved, strict=True)
            if value is not NOT_SENT
        }
        for value in (request.extra_body, *values):
            _find(value, reserved, 0)
        for name in reserved:
            metrics.STRIPPED.labels(name).inc()
            if name not in self._logged:
                self._logged.add(name)
                _log.warning(
                    "field_stripped", field=name, why="reserved for the fleet; a client's value is ignored"
                )
        return frozenset(reserved)


def _find(value: Any, reserved: set[str], depth: int) -> None:
    if depth > DEPTH_MAX:
        return
    if isinstance(value, dict):
        for name, inner in value.items():
            if is_reserved(name):
                # Clients must not be able to choose a label of the metric.
                reserved.add(name if name in NAMES else next(p + "*" for p in PREFIXES if name.startswith(p)))
            else:
                _find(inner, reserved, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            _find(inner, reserved, depth + 1)
