"""The recorded outputs of the package `canitoolcall`, and which of our formats each model writes.

The package holds 469 outputs of nine families of models: rendered by their own chat templates, or taken from the tests
and bug reports of engines, each with the result that a correct parser has, and judges results by rules of its own. Its
data has many licences and stays in it.
"""

import hashlib
import random
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, Final, NamedTuple

from headwater.actors.edge.parsing.grammar import ParsedOutput, collect
from headwater.actors.edge.parsing.selection import make_parser, starts_in_reasoning
from headwater.ops.config.setting import ConfigError

FORMATS: Final = {
    "deepseek-v3": ("deepseek_v3", "think"),
    "deepseek-v31": ("deepseek_v31", "think"),
    "deepseek-v32": ("deepseek_v32", "think"),
    "deepseek-v4": ("deepseek_v32", "think"),
    "deepseek-v41": ("deepseek_v32", "think"),
    "gemma4": ("gemma4", "gemma4"),
    "glm45-newline": ("glm", "think"),
    "glm47-compact": ("glm", "think"),
    "glm53-compact": ("glm", "think"),
    "gpt-oss": ("harmony", "harmony"),
    "kimi-k2-instruct": ("kimi_k2", "think"),
    "kimi-k2-thinking": ("kimi_k2", "think"),
    "kimi-k3-xtml": ("kimi_k3", "kimi_k3"),
    "llama3-json": ("llama3_json", ""),
    "llama4-pythonic": ("pythonic", ""),
    "devstral-2507": ("mistral", "mistral"),
    "v11": ("mistral", "mistral"),
    "v11-think-text": ("mistral", "mistral"),
    "v13": ("mistral", "mistral"),
    "v13-think": ("mistral", "mistral"),
    "v13plus-think": ("mistral", "mistral"),
    "v3": ("mistral", "mistral"),
    "qwen3-hybrid": ("hermes", "think"),
    "qwen3-instruct-2507": ("hermes", "think"),
    "qwen3-thinking-2507": ("hermes", "think"),
    "qwen3-coder": ("qwen3_coder", "think"),
    "qwen3-coder-next": ("qwen3_coder", "think"),
    "qwen3.5": ("qwen3_coder", "think"),
    "qwen3.6": ("qwen3_coder", "think"),
    "qwen3.8": ("qwen3_coder", "think"),
}
"""Tool and reasoning format of each variant that the package names."""

_TOKEN: Final = re.compile(r" ?[^\W\d_]{1,6}|\d{1,3}|[^\w\s]{1,3}|\s+|.", re.DOTALL)


class RecordedOutput(NamedTuple):
    """One recorded output. `fixture` and `family` are the package's own objects."""

    fixture: Any
    family: Any
    tool_format: str
    reasoning_format: str
    inside: bool

    @property
    def held_out(self) -> bool:
        """Is it in the half that the parsers were not written with?"""
        return bool(hashlib.sha256(self.fixture.id.encode()).digest()[0] % 2)

    def parse(self, pieces: Iterator[str] | list[str]) -> ParsedOutput:
        """Feed the output in pieces to a parser of its formats."""
        parser = make_parser(
            self.tool_format,
            self.reasoning_format,
            tools=self.fixture.tools,
            starts_in_reasoning=self.inside,
        )
        events = [event for piece in pieces for event in parser.push(piece)]
        return collect([*events, *parser.finish()])


@cache
def load() -> tuple[RecordedOutput, ...]:
    """Load all recorded outputs. Raises `ConfigError` if the package is not installed."""
    try:
        from canitoolcall import fixtures
    except ImportError as error:
        raise ConfigError(
            "bench parsers replays the outputs in the package canitoolcall: pip install canitoolcall==0.1.1"
        ) from error
    families = fixtures.load_families()
    found: list[RecordedOutput] = []
    for fixture in fixtures.load_fixtures():
        family = families[fixture.family]
        reference = next(one for one in family.reference_models if one.repo == fixture.models[0])
        tool_format, reasoning_format = FORMATS[reference.variant or ""]
        prompt = fixture.generation_prompt or reference.default_generation_prompt or ""
        inside = starts_in_reasoning(reasoning_format, prompt)
        found.append(RecordedOutput(fixture, family, tool_format, reasoning_format, inside))
    return tuple(found)


def tokens_of(text: str) -> list[str]:
    """Cut a text into pieces of about a token: the vocabularies of the models are not in the package."""
    return _TOKEN.findall(text)


def cuts_of(text: str) -> Iterator[tuple[str, list[str]]]:
    """Ways in which a text may arrive, by name: by token, in groups of 2 to 7, by character, at random."""
    tokens = tokens_of(text)
    yield "token", tokens
    for size in range(2, 8):
        yield f"{size} tokens", ["".join(tokens[at : at + size]) for at in range(0, len(tokens), size)]
    yield "character", list(text)
    draw = random.Random(len(text))
    pieces: list[str] = []
    at = 0
    while at < len(text):
        pieces.append(text[at : at + draw.randint(1, 30)])
        at += len(pieces[-1])
    yield "random", pieces
