"""What of a generation an OpenAI client asked to see."""

from typing import Final, NamedTuple

from headwater.actors.edge.api.openai.types import ChatRequest, CompletionRequest
from headwater.actors.edge.request.settings import ReasoningField

REASONING_FIELDS: Final = ("reasoning_content", "reasoning")
"""The two names of reasoning that clients expect: DeepSeek's and SGLang's, and vLLM's."""


class ShownParts(NamedTuple):
    """`usage`: a last chunk with it; `progress`: in every chunk too. `reasoning`: under these names, empty for none."""

    logprobs: bool = False
    prompt_logprobs: bool = False
    token_ids: bool = False
    echo: bool = False
    usage: bool = False
    progress: bool = False
    reasoning: tuple[str, ...] = REASONING_FIELDS


def shown_in_chat(request: ChatRequest, field: ReasoningField = "both") -> ShownParts:
    """For a chat completion. `field`: the name of reasoning on this edge."""
    reasoning = REASONING_FIELDS if field == "both" else (field,)
    return ShownParts(
        logprobs=bool(request.logprobs),
        prompt_logprobs=request.prompt_logprobs is not None,
        token_ids=bool(request.return_token_ids),
        usage=_usage(request),
        progress=_progress(request),
        reasoning=reasoning if request.include_reasoning is not False else (),
    )


def shown_in_completion(request: CompletionRequest) -> ShownParts:
    """For a text completion."""
    return ShownParts(
        logprobs=request.logprobs is not None,
        prompt_logprobs=request.prompt_logprobs is not None,
        token_ids=bool(request.return_token_ids),
        echo=bool(request.echo),
        usage=_usage(request),
        progress=_progress(request),
    )


def _usage(request: ChatRequest | CompletionRequest) -> bool:
    return bool(request.stream_options and request.stream_options.include_usage)


def _progress(request: ChatRequest | CompletionRequest) -> bool:
    return bool(request.stream_options and request.stream_options.continuous_usage_stats)
