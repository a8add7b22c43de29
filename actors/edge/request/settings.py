"""Settings of an edge: types, defaults and descriptions only. Light to import: the command line reads them."""

from typing import Annotated, Literal, NamedTuple

import msgspec

from headwater.schemas.constraints import CLIENT_POLICIES

ReasoningField = Literal["both", "reasoning_content", "reasoning"]
"""The name of reasoning in OpenAI's chat completions: that of DeepSeek and SGLang, that of vLLM, or both."""

HostedTools = Literal["omit", "reject"]
"""What is done with tools that an API's own servers would run."""


class ClientLimits(NamedTuple):
    """Which routing options clients may use."""

    policies: Annotated[
        tuple[str, ...],
        msgspec.Meta(
            description="routing policies that a request may name (x-headwater-policy), comma-separated; empty: none"
        ),
    ] = CLIENT_POLICIES
    temperature_max: Annotated[
        float,
        msgspec.Meta(
            ge=0,
            description="maximum routing temperature that a request may ask for (x-headwater-router-temperature)",
        ),
    ] = 1.0
