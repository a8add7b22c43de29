"""From a request's fields to what an engine is told about picking tokens. Pure."""

from typing import Any

from headwater.actors.edge.errors import bad_request
from headwater.actors.edge.openai import Common
from headwater.schemas.inference import Guide, Sampling


def sampling_of(
    request: Common,
    *,
    limit: int,
    logprobs: int | None,
    guide: Guide | None = None,
    processors: dict[str, dict[str, Any]] | None = None,
) -> Sampling:
    """The engine's view of a request. `limit` is the number of tokens that may be generated."""
    if request.repetition_penalty is not None and request.repetition_penalty <= 0:
        raise bad_request("repetition_penalty must be above 0.", param="repetition_penalty")
    if request.min_tokens is not None and request.min_tokens > limit:
        raise bad_request(f"min_tokens must be from 0 to {limit}.", param="min_tokens")
    return Sampling(
        max_tokens=limit,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=max(0, request.top_k or 0),
        min_p=request.min_p or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=request.repetition_penalty or 1.0,
        seed=request.seed,
        min_tokens=request.min_tokens or 0,
        ignore_eos=bool(request.ignore_eos),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        logprobs=logprobs,
        logit_bias=request.bias(),
        guide=guide,
        processors=processors or {},
    )
