"""Requests of OpenAI's endpoints as the internal request. Pure."""

from typing import Any, Final

from headwater.actors.edge.api.openai.chat_encoder import CHAT_PREFIX
from headwater.actors.edge.api.openai.completion_encoder import COMPLETION_PREFIX
from headwater.actors.edge.api.openai.messages import turns_of
from headwater.actors.edge.api.openai.tools import choice_of, tools_of
from headwater.actors.edge.api.openai.types import ChatRequest, CompletionCommon, CompletionRequest
from headwater.actors.edge.generation.hosted_tools import OPENAI, hosted_name
from headwater.actors.edge.generation.request import (
    GenerationRequest,
    Hints,
    PromptOptions,
    Reasoning,
    SamplingFields,
)
from headwater.actors.http.errors import bad_request

DEFAULT_COMPLETION_TOKENS: Final = 16
"""What /v1/completions generates when the client sets no limit, as OpenAI does."""


def chat_request(request: ChatRequest) -> GenerationRequest:
    """A chat completion. Raises `ApiError` 400."""
    newer = request.max_completion_tokens
    offered = request.tools or ()
    choice, tools = choice_of(
        request.tool_choice, tools_of(offered), parallel=request.parallel_tool_calls is not False
    )
    variables = dict(request.chat_template_kwargs or {})
    if request.documents:
        variables["documents"] = request.documents
    return GenerationRequest(
        param="messages",
        endpoint="chat",
        id_prefix=CHAT_PREFIX,
        messages=turns_of(request.messages),
        tools=tools,
        omitted_tools=tuple([name for tool in offered if (name := hosted_name(tool, OPENAI))]),
        tool_choice=choice,
        reasoning=_reasoning(request),
        best_of=request.n or 1,
        sampling=_sampling(request, request.logprob_count()),
        max_tokens=newer or request.max_tokens,
        max_tokens_param="max_completion_tokens" if newer else "max_tokens",
        logprobs_param="top_logprobs",
        prompt_options=PromptOptions(
            add_special_tokens=request.add_special_tokens,
            add_generation_prompt=request.add_generation_prompt is not False,
            continue_final=bool(request.continue_final_message),
            truncate_tokens=request.truncate_prompt_tokens,
            variables=variables,
        ),
        **_common(request),
    )


def completion_request(request: CompletionRequest) -> GenerationRequest:
    """A text completion. Raises `ApiError` 400."""
    limit = DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    if not limit and not request.echo:
        raise bad_request("max_tokens 0 is possible with echo only.", param="max_tokens")
    return GenerationRequest(
        param="prompt",
        endpoint="completions",
        id_prefix=COMPLETION_PREFIX,
        prompts=tuple(request.prompts()),
        suffix=request.suffix or "",
        echo=bool(request.echo),
        best_of=_best_of(request),
        sampling=_sampling(request, request.logprobs),
        max_tokens=limit,
        prompt_options=PromptOptions(
            add_special_tokens=request.add_special_tokens, truncate_tokens=request.truncate_prompt_tokens
        ),
        raw_answer=True,
        **_common(request),
    )


def _best_of(request: CompletionRequest) -> int:
    choices = request.n or 1
    best_of = request.best_of or choices
    if best_of < choices:
        raise bad_request(f"best_of is {best_of}, less than n, which is {choices}.", param="best_of")
    if best_of > choices and request.stream:
        raise bad_request("best_of above n cannot be streamed.", param="best_of")
    return best_of


def _reasoning(request: ChatRequest) -> Reasoning:
    thinking, enabled, budget = request.thinking, request.enable_thinking, request.thinking_token_budget
    if thinking is not None:
        if enabled is None and thinking.type != "auto":
            enabled = thinking.type == "enabled"
        budget = thinking.budget_tokens if budget is None else budget
    param = "thinking_token_budget" if request.thinking_token_budget is not None else ""
    return Reasoning(request.reasoning_effort, enabled, budget, param)


def _common(request: CompletionCommon) -> dict[str, Any]:
    guided = request.guide()
    return {
        "model": request.model,
        "choices": request.n or 1,
        "stops": tuple(request.stops()),
        "guide": guided[1] if guided else None,
        "guide_param": guided[0] if guided else "",
        "stream": bool(request.stream),
        "return_token_ids": bool(request.return_token_ids),
        "include_stop": bool(request.include_stop_str_in_output),
        "skip_special_tokens": request.skip_special_tokens is not False,
        "hints": Hints(
            user=request.user,
            session=request.prompt_cache_key,
            priority=request.priority,
            cache_salt=request.cache_salt or "",
        ),
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
        allowed_token_ids=tuple(request.allowed_token_ids or ()),
        bad_words=tuple(request.bad_words or ()),
        logprobs=logprobs,
        prompt_logprobs=request.prompt_logprobs,
        processors=request.logits_processors,
    )
