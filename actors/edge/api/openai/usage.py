"""Token counts as OpenAI names them."""

import msgspec

from headwater.actors.edge.generation.events import TokenUsage


class PromptTokens(msgspec.Struct, omit_defaults=True):
    """Prompt tokens that were read from an engine's cache, those that were computed and stored there, and those that stand for audio."""

    cached_tokens: int | None = None
    cache_write_tokens: int | None = None
    audio_tokens: int | None = None


class CompletionTokens(msgspec.Struct):
    """Tokens of the completion that were reasoning."""

    reasoning_tokens: int


class Usage(msgspec.Struct, omit_defaults=True):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens | None = None
    completion_tokens_details: CompletionTokens | None = None


def usage_of(counts: TokenUsage) -> Usage:
    """The counts in OpenAI's shape."""
    details = PromptTokens(counts.cached_tokens, counts.cache_write_tokens, counts.audio_tokens or None)
    return Usage(
        counts.prompt_tokens,
        counts.completion_tokens,
        counts.total_tokens,
        details if details != PromptTokens() else None,
        CompletionTokens(counts.reasoning_tokens) if counts.reasoning_tokens else None,
    )
