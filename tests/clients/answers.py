"""What the scripted engine answers: outputs of Qwen 3 as recorded in `canitoolcall`, by what a prompt contains."""

from importlib import resources
from typing import Any, Final

import msgspec

from tests.support.engines.scripted import Answer

FAMILY: Final = "qwen3-hermes"

CUES: Final = {
    "": "no-call-thinking",
    "What is the weather in Paris?": "single-call-thinking",
    "What is the weather in Zürich, and which cafés are open?": "parallel-two-calls-thinking",
    "20C": "multi-turn-final-answer-thinking",
    "2 + 2": "thinking2507-no-call",
}
"""A cue, and the output that answers it. The tools of the tests' clients return `20C`, which calls for the last answer."""


def recorded(family: str = FAMILY) -> dict[str, dict[str, Any]]:
    """Recorded outputs of a family of models by name, as `canitoolcall` has them."""
    found: dict[str, dict[str, Any]] = {}
    for file in (resources.files("canitoolcall") / "_data" / "fixtures" / family).iterdir():
        if file.name.endswith(".jsonl"):
            for line in file.read_text("utf-8").splitlines():
                fixture = msgspec.json.decode(line)
                found[fixture["id"].partition("/")[2]] = fixture
    return found


def answers() -> list[Answer]:
    """The answers of the scripted engine."""
    fixtures = recorded()
    return [Answer(cue, _whole(fixtures[name])) for cue, name in CUES.items()]


def _whole(fixture: dict[str, Any]) -> str:
    """The output with what its prompt began of it: some templates open the thoughts themselves."""
    opened = "<think>\n" if fixture["generation_prompt"].endswith("<think>\n") else ""
    output: str = fixture["raw_output"]
    return opened + output
