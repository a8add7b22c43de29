"""Token counts as OpenAI names them."""

import msgspec

from headwater.actors.edge.generation.events import TokenUsage


class Usage(msgspec.Struct, omit_defaults=True):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int] | None = None
    completion_tokens_details: dict[str, int] | None = None


def usage_of(counts: TokenUsage) -> Usage:
    """The counts in OpenAI's shape."""
    cached = {"cached_tokens": counts.cached_tokens} if counts.cached_tokens is not None else None
    return Usage(counts.prompt_tokens, counts.completion_tokens, counts.total_tokens, cached)
