"""Fields of OpenAI's API that are not served here: ignored, each with the reason, or rejected by name."""

from collections.abc import Mapping
from typing import Any, Final

IGNORED_IN_COMPLETIONS: Final[Mapping[str, str]] = {
    "metadata": "answers are not stored",
    "store": "answers are not stored",
    "service_tier": "there is one tier; `priority` orders requests",
    "safety_identifier": "no abuse is reported",
    "prompt_cache_retention": "cached prompts stay until their space is needed",
}

IGNORED_IN_CHAT: Final[Mapping[str, str]] = {
    **IGNORED_IN_COMPLETIONS,
    "verbosity": "a hint that open models do not know",
    "prediction": "a hint for speed",
}

REJECTED_IN_COMPLETIONS: Final[Mapping[str, tuple[Any, ...]]] = {"prompt_cache_options": (None, {})}
REJECTED_IN_CHAT: Final[Mapping[str, tuple[Any, ...]]] = {**REJECTED_IN_COMPLETIONS, "echo": (None, False)}
"""In addition to those that no API serves (`headwater.actors.edge.request.fields`): the values that are accepted."""
