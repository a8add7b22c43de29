"""The templates that llama.cpp's distribution carries: 70 of published models."""

from pathlib import Path

import pytest

from headwater.actors.edge.model.chat_template import ChatTemplate
from tests.templates.judge import SPECIAL, cells

FOLDER = Path(__file__).parents[2] / ".templates"

EXPLAINED = {
    # It needs two variables that no other template has: its functions as one text, and the date.
    "fireworks-ai-llama-3-firefunction-v2",
}
"""Templates with cells that are wrong."""


def test_each_conversation_is_rendered_whole() -> None:
    """28 shapes of conversations: no word is lost, none is refused, and nothing stands for a missing value."""
    found = cells(FOLDER)
    assert len(found) >= 70 * 28, "the templates are missing: make templates"
    wrong = {(name, shape): problem for name, shape, problem in found if problem and name not in EXPLAINED}
    assert not wrong


@pytest.mark.parametrize(
    "name", ["Qwen-Qwen3-0.6B", "openai-gpt-oss-120b", "unsloth-mistral-Devstral-Small-2507"]
)
def test_a_template_that_renders_calls_renders_its_own(name: str) -> None:
    """Calls are not replaced by text where the model has a format for them."""
    assert ChatTemplate((FOLDER / f"{name}.jinja").read_text(), SPECIAL).form.calls
