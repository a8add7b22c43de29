"""Requests of OpenAI's endpoints as the internal request. Pure."""

from typing import Any, Final

from headwater.actors.edge.api.openai.encoders import CHAT_PREFIX, COMPLETION_PREFIX, ShownParts
from headwater.actors.edge.api.openai.messages import turns_of
from headwater.actors.edge.api.openai.types import ChatRequest, CompletionCommon, CompletionRequest
from headwater.actors.edge.generation.request import GenerationRequest, Hints, PromptOptions, SamplingFields

DEFAULT_COMPLETION_TOKENS: Final = 16
"""What /v1/completions generates when the client sets no limit, as OpenAI does."""


def chat_request(request: ChatRequest) -> GenerationRequest:
    """A chat completion. Raises `ApiError` 400."""
    newer = request.max_completion_tokens
    return GenerationRequest(
        param="messages",
        endpoint="chat",
        id_prefix=CHAT_PREFIX,
        messages=turns_of(request.messages),
        sampling=_sampling(request, request.logprob_count()),
        max_tokens=newer or request.max_tokens,
        max_tokens_param="max_completion_tokens" if newer else "max_tokens",
        logprobs_param="top_logprobs",
        prompt_options=PromptOptions(
            add_special_tokens=request.add_special_tokens,
            add_generation_prompt=request.add_generation_prompt is not False,
            variables=request.chat_template_kwargs or {},
        ),
        **_common(request),
    )


def completion_request(request: CompletionRequest) -> GenerationRequest:
    """A text completion. Raises `ApiError` 400."""
    return GenerationRequest(
        param="prompt",
        endpoint="completions",
        id_prefix=COMPLETION_PREFIX,
        prompts=tuple(request.prompts()),
        sampling=_sampling(request, request.logprobs),
        max_tokens=request.max_tokens or DEFAULT_COMPLETION_TOKENS,
        prompt_options=PromptOptions(add_special_tokens=request.add_special_tokens),
        raw_answer=True,
        **_common(request),
    )


def shown_of(request: CompletionCommon, *, logprobs: bool) -> ShownParts:
    """What the client asked to see of the answer."""
    options = request.stream_options
    return ShownParts(logprobs=logprobs, usage=bool(options and options.include_usage))


def _common(request: CompletionCommon) -> dict[str, Any]:
    guided = request.guide()
    return {
        "model": request.model,
        "choices": request.n or 1,
        "best_of": request.n or 1,
        "stops": tuple(request.stops()),
        "guide": guided[1] if guided else None,
        "guide_param": guided[0] if guided else "",
        "stream": bool(request.stream),
        "hints": Hints(user=request.user, priority=request.priority, cache_salt=request.cache_salt or ""),
    }


def _sampling(request: CompletionCommon, logprobs: int | None) -> SamplingFields:
    return SamplingFields(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        seed=request.seed,
        min_tokens=request.min_tokens,
        ignore_eos=bool(request.ignore_eos),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        logit_bias=request.bias(),
        logprobs=logprobs,
        processors=request.logits_processors,
    )
