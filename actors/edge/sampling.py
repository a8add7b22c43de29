"""From a request's fields to what an engine is told about picking tokens. Pure."""

from collections.abc import Mapping
from typing import Any, Final

from headwater.actors.edge.errors import bad_request
from headwater.actors.edge.openai import Common
from headwater.schemas.inference import Guide, Sampling

REPETITION_PENALTY_MAX: Final = 10.0
"""Engines take any positive number; what is far from 1 leaves nothing of the distribution."""

NO_DEFAULTS: Final[Mapping[str, float]] = {}


def sampling_of(
    request: Common,
    *,
    limit: int,
    logprobs: int | None,
    guide: Guide | None = None,
    processors: dict[str, dict[str, Any]] | None = None,
    defaults: Mapping[str, float] = NO_DEFAULTS,
) -> Sampling:
    """The engine's view of a request. `limit` is the number of tokens that may be generated.

    `defaults` are the model's own values of fields that the request leaves out. Raises `ApiError` 400.
    """

    def chosen(name: str, otherwise: float) -> float:
        value: float | None = getattr(request, name)
        return float(defaults.get(name, otherwise)) if value is None else value

    if request.top_p == 0:
        raise bad_request(
            "top_p must be above 0: temperature 0 always picks the likeliest token.", param="top_p"
        )
    penalty = request.repetition_penalty
    if penalty is not None and not 0 < penalty <= REPETITION_PENALTY_MAX:
        raise bad_request(
            f"repetition_penalty must be above 0 and at most {REPETITION_PENALTY_MAX:g}.",
            param="repetition_penalty",
        )
    if request.min_tokens is not None and request.min_tokens > limit:
        raise bad_request(f"min_tokens must be from 0 to {limit}.", param="min_tokens")
    return Sampling(
        max_tokens=limit,
        temperature=chosen("temperature", 1.0),
        top_p=chosen("top_p", 1.0),
        top_k=max(0, int(chosen("top_k", 0))),
        min_p=chosen("min_p", 0.0),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=chosen("repetition_penalty", 1.0),
        seed=request.seed,
        min_tokens=request.min_tokens or 0,
        ignore_eos=bool(request.ignore_eos),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        logprobs=logprobs,
        logit_bias=request.bias(),
        guide=guide,
        processors=processors or {},
    )
