"""From the sampling fields of a request to what engines get, checked against the model. Pure."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from headwater.actors.edge.generation.prompts import too_long
from headwater.actors.edge.generation.request import GenerationRequest, SamplingFields
from headwater.actors.edge.guided.logits_processors import processors_of
from headwater.actors.edge.model.catalog import Model
from headwater.actors.http.errors import bad_request
from headwater.schemas.messages.inference import Guide, Sampling
from headwater.schemas.tables.capability import Capability, needs_of
from headwater.schemas.tables.card import ModelCard

REPETITION_PENALTY_MAX: Final = 10.0
"""Engines take any positive number, but a value far from 1 destroys the distribution."""

PROMPT_LOGPROBS_MAX: Final = 32_768
"""Log probabilities of one prompt: they travel in one message."""

NO_DEFAULTS: Final[Mapping[str, float]] = {}


def sampling_for(
    request: GenerationRequest,
    model: Model,
    context: int,
    longest: int,
    guide: Guide | None,
    guide_param: str,
) -> Sampling:
    """How the engine samples for a request whose longest prompt has `longest` tokens of this context. Raises `ApiError` 400."""
    card, fields = model.card, request.sampling
    if longest >= context:
        has = f"{longest} tokens in the prompt and {request.max_tokens or 1} in the completion"
        raise too_long(model, context, has, request.param, tokens=longest)
    # What a client asks for at most is no more than what fits: agents ask for 32,000 whatever the model.
    limit = min(request.max_tokens, context - longest) if request.max_tokens else request.max_tokens
    if limit is None:
        limit = min(context - longest, int(card.default_sampling.get("max_tokens", context)))
    sampling = sampling_of(
        fields,
        # An engine generates at least one token, also for a client that wants none.
        limit=max(1, limit),
        guide=guide,
        processors=processors_of(fields.processors, card.logits_processors),
        defaults=card.default_sampling,
    )
    sampling = _with_budget(_with_logprobs(sampling, request, card), request, model)
    # An engine without cache salts would share the prompt's blocks with other clients.
    for need in needs_of(sampling, cache_salt=request.hints.cache_salt):
        require(card, need.capability, guide_param if need.capability == "guide" else need.param)
    if fields.logprobs is not None and fields.logprobs > card.logprobs_max:
        param = request.logprobs_param
        raise bad_request(f"{param} must be from 0 to {card.logprobs_max} for this model.", param=param)
    _check_prompt_logprobs(sampling, longest, card)
    vocabulary = card.vocabulary or model.tokenizer.vocabulary
    for param in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
        if tokens := getattr(sampling, param):
            _check_tokens(tokens, vocabulary, param)
    return sampling


def _with_logprobs(sampling: Sampling, request: GenerationRequest, card: ModelCard) -> Sampling:
    """With the log probabilities that other features need: best_of those of the answer, echo those of the prompt."""
    if request.best_of > request.choices and sampling.logprobs is None:
        require(card, "logprobs", "best_of")
        sampling = msgspec.structs.replace(sampling, logprobs=0)
    if request.echo and request.sampling.logprobs is not None and sampling.prompt_logprobs is None:
        require(card, "prompt_logprobs", "echo")
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=request.sampling.logprobs)
    return sampling


def _with_budget(sampling: Sampling, request: GenerationRequest, model: Model) -> Sampling:
    """With the budget for reasoning, if the engine enforces one. Else it is the template's, or a hint without effect."""
    reasoning = request.reasoning
    if reasoning.budget is None:
        return sampling
    if "thinking_budget" in model.card.capabilities:
        return msgspec.structs.replace(sampling, thinking_budget=reasoning.budget)
    by_template = model.template is not None and model.template.mentions("thinking_budget")
    if reasoning.budget_param and not by_template:
        require(model.card, "thinking_budget", reasoning.budget_param)
    return sampling


def _check_prompt_logprobs(sampling: Sampling, longest: int, card: ModelCard) -> None:
    count = sampling.prompt_logprobs
    if count is None:
        return
    if count > card.logprobs_max:
        raise bad_request(
            f"prompt_logprobs must be from 0 to {card.logprobs_max} for this model.", param="prompt_logprobs"
        )
    if longest * (count + 1) > PROMPT_LOGPROBS_MAX:
        raise bad_request(
            f"The prompt has {longest} tokens; with {count} alternatives each that is more than"
            f" {PROMPT_LOGPROBS_MAX} log probabilities.",
            param="prompt_logprobs",
        )


def sampling_of(
    fields: SamplingFields,
    *,
    limit: int,
    guide: Guide | None = None,
    processors: dict[str, dict[str, Any]] | None = None,
    defaults: Mapping[str, float] = NO_DEFAULTS,
) -> Sampling:
    """How the engine samples. `limit` is the number of tokens that may be generated.

    `defaults` are the model's own values of fields that the request leaves out. Raises `ApiError` 400.
    """

    def chosen(name: str, otherwise: float) -> float:
        value: float | None = getattr(fields, name)
        return float(defaults.get(name, otherwise)) if value is None else value

    if fields.top_p == 0:
        raise bad_request(
            "top_p must be above 0: temperature 0 always selects the most likely token.", param="top_p"
        )
    penalty = fields.repetition_penalty
    if penalty is not None and not 0 < penalty <= REPETITION_PENALTY_MAX:
        raise bad_request(
            f"repetition_penalty must be above 0 and at most {REPETITION_PENALTY_MAX:g}.",
            param="repetition_penalty",
        )
    if fields.min_tokens is not None and fields.min_tokens > limit:
        raise bad_request(f"min_tokens must be from 0 to {limit}.", param="min_tokens")
    return Sampling(
        max_tokens=limit,
        temperature=chosen("temperature", 1.0),
        top_p=chosen("top_p", 1.0),
        top_k=max(0, int(chosen("top_k", 0))),
        min_p=chosen("min_p", 0.0),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        repetition_penalty=chosen("repetition_penalty", 1.0),
        seed=fields.seed,
        min_tokens=fields.min_tokens or 0,
        ignore_eos=fields.ignore_eos,
        stop_token_ids=fields.stop_token_ids,
        logprobs=fields.logprobs,
        logit_bias=fields.logit_bias,
        guide=guide,
        processors=processors or {},
        prompt_logprobs=fields.prompt_logprobs,
        allowed_token_ids=fields.allowed_token_ids,
        bad_words=fields.bad_words,
    )


def require(card: ModelCard, capability: Capability, param: str) -> None:
    """Raises `ApiError` 400 naming the field and the capability that the engine lacks."""
    if capability not in card.capabilities:
        raise bad_request(
            f"{param} is not supported for {card.name}: its engine, {card.engine}, lacks capability {capability!r}.",
            param=param,
        )


def _check_tokens(tokens: Iterable[int], vocabulary: int, param: str) -> None:
    for token in tokens:
        if token >= vocabulary:
            raise bad_request(
                f"{param}: token id {token} is outside the vocabulary of {vocabulary}.", param=param
            )


def with_seed(sampling: Sampling, number: int) -> Sampling:
    """The sampling of one choice: seeds count up from the client's, and wrap around after the greatest."""
    if sampling.seed is None:
        return sampling
    seed = (sampling.seed + number + 2**63) % 2**64 - 2**63
    return msgspec.structs.replace(sampling, seed=seed)
