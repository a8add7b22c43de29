"""Hand-offs of TensorRT-LLM: the `DisaggregatedParams` of a prefill leg as opaque bytes, and those of a decode leg made from them."""

import secrets
from typing import Any

import msgspec

from headwater.engines.engine import EngineError, Transfer
from headwater.engines.handoff_params import digest_of
from headwater.engines.tensorrt_llm import HandoffMode
from headwater.schemas.messages.inference import Choreography, GenerateRequest

CHOREOGRAPHIES: dict[HandoffMode, Choreography] = {
    "context-first": "returned",
    "generation-first": "room",
    "opaque": "opaque",
}

USED_MAX = 4_096
"""Hand-offs that are remembered as used; the oldest is forgotten first."""

GLOBAL_ID_MIN = 1 << 40
"""Smaller ids are TensorRT-LLM's own, of requests within one engine."""


class HandoffParams(msgspec.Struct, frozen=True):
    """What a decode leg needs. `digest` names the prompt: TensorRT-LLM would continue any other from the same KV."""

    digest: bytes
    first_tokens: list[int] = []
    ctx_request_id: int | None = None
    opaque_state: bytes | None = None
    draft_tokens: list[int] | None = None
    disagg_request_id: int | None = None
    ctx_dp_rank: int | None = None
    ctx_info_endpoint: str | None = None


def new_request_id() -> int:
    """An id for both legs, unique in the fleet: 62 random bits, above TensorRT-LLM's own.

    Its own scheme gives each process a number of 6 bits on a node of 8, which a central place would have to assign.
    """
    return GLOBAL_ID_MIN | secrets.randbits(62)


def pack(request: GenerateRequest, given: Any) -> bytes:
    """The parameters that a finished prefill leg returned."""
    return msgspec.msgpack.encode(
        HandoffParams(
            digest_of(request),
            list(given.first_gen_tokens or ()),
            given.ctx_request_id,
            given.opaque_state,
            given.draft_tokens,
            given.disagg_request_id,
            given.ctx_dp_rank,
            given.ctx_info_endpoint,
        )
    )


def pack_meeting(request: GenerateRequest, request_id: int, endpoint: str | None, rank: int) -> bytes:
    """The parameters of a prefill leg that has just started, for a decode leg that starts now as well."""
    return msgspec.msgpack.encode(
        HandoffParams(
            digest_of(request), disagg_request_id=request_id, ctx_dp_rank=rank, ctx_info_endpoint=endpoint
        )
    )


def unpack(request: GenerateRequest, transfer: Transfer) -> HandoffParams:
    """The parameters for this decode leg. Raises `EngineError` if they are not readable, or another prompt's."""
    try:
        params = msgspec.msgpack.decode(transfer.params, type=HandoffParams)
    except msgspec.DecodeError as error:
        raise EngineError(f"its hand-off cannot be read: {error}") from error
    if params.digest != digest_of(request):
        raise EngineError("its hand-off belongs to another prompt")
    return params


def for_prefill(api: Any, mode: HandoffMode, request_id: int) -> Any:
    """`DisaggregatedParams` of a prefill leg."""
    style = api.DisaggScheduleStyle
    return api.DisaggregatedParams(
        request_type="context_only",
        disagg_request_id=request_id,
        schedule_style=style.GENERATION_FIRST if mode == "generation-first" else style.CONTEXT_FIRST,
    )


def for_decode(api: Any, mode: HandoffMode, params: HandoffParams) -> Any:
    """`DisaggregatedParams` of a decode leg."""
    style = api.DisaggScheduleStyle
    return api.DisaggregatedParams(
        request_type="generation_only",
        first_gen_tokens=params.first_tokens or None,
        ctx_request_id=params.ctx_request_id,
        opaque_state=params.opaque_state,
        draft_tokens=params.draft_tokens,
        disagg_request_id=params.disagg_request_id,
        ctx_dp_rank=params.ctx_dp_rank,
        ctx_info_endpoint=params.ctx_info_endpoint,
        schedule_style=style.GENERATION_FIRST if mode == "generation-first" else style.CONTEXT_FIRST,
    )
