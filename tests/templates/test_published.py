"""The templates that llama.cpp's distribution carries: 70 of published models."""

from pathlib import Path
from typing import Any

import pytest

from headwater.actors.edge.chat_template import ChatTemplate
from headwater.actors.edge.parsing.selection import detect
from headwater.actors.edge.prompt.conversation import template_messages, template_variables
from headwater.actors.edge.prompt.prompts import tool_definition
from headwater.actors.edge.prompt.request import (
    GenerationRequest,
    Reasoning,
    TextPart,
    Tool,
    ToolChoice,
    Turn,
)
from headwater.actors.edge.template_form import TemplateForm
from tests.templates.judge import CONVERSATIONS, SPECIAL, cells, judge, renders

FOLDER = Path(__file__).parents[2] / ".templates"

FAULTS = {
    (
        "google-gemma-4-31B-it",
        "result without its call",
    ): "a result without its call is left out without a word"
}
"""Cells that are wrong, and why."""

NO_LISTS_APPENDED = {"Kimi-K2-Instruct", "Kimi-K2-Thinking"}
"""They append to a list at each call, which Hugging Face's sandbox refuses as well."""


def form(name: str) -> TemplateForm:
    return ChatTemplate((FOLDER / f"{name}.jinja").read_text(), SPECIAL).form


def test_each_conversation_is_rendered_whole() -> None:
    """88 conversations through three APIs: no word is lost, none runs into another, none is refused, and nothing stands for a missing value."""
    found = list(cells(FOLDER))
    assert len(found) >= 70 * len(CONVERSATIONS), "the templates are missing: make templates"
    wrong = {cell[:2]: cell.problem for cell in found if cell.problem and cell[:2] not in FAULTS}
    assert not wrong


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param(*place, marks=pytest.mark.xfail(strict=True, reason=reason))
        for place, reason in FAULTS.items()
    ],
)
def test_a_conversation_that_loses_something(name: str, shape: str) -> None:
    """Known faults, which fail here once they are mended."""
    source = (FOLDER / f"{name}.jinja").read_text()
    assert not judge(renders(ChatTemplate(source, SPECIAL)), CONVERSATIONS[shape])


def _calling() -> list[str]:
    found: list[str] = []
    for path in sorted(FOLDER.glob("*.jinja")):
        if "tool_calls" in path.read_text() and path.stem not in NO_LISTS_APPENDED:
            found.append(path.stem)
    return found


@pytest.mark.parametrize("name", _calling())
def test_a_template_that_renders_calls_renders_its_own(name: str) -> None:
    """Calls are not replaced by text where the model has a format for them."""
    assert form(name).calls


def test_a_template_that_renders_tools_renders_its_own() -> None:
    assert form("CohereForAI-c4ai-command-r-plus-tool_use").tools


NO_FORMAT = {
    "HuggingFaceTB-SmolLM3-3B": "its template here shows no tools",
    "google-gemma-2-2b-it": "it knows no tools",
    "llama-cpp-rwkv-world": "it knows no tools",
    "microsoft-Phi-3.5-mini-instruct": "it knows no tools",
    "meetkai-functionary-medium-v3.2": "the prompt ends inside its first marker",
    "muse-glimmer": "not read",
}
"""Templates whose format of calls is not known."""


def test_formats_of_calls_are_found() -> None:
    found = {path.stem: detect(path.read_text()).tool_format for path in FOLDER.glob("*.jinja")}
    assert {name for name, form in found.items() if not form} == NO_FORMAT.keys()


def prompt(name: str, **fields: Any) -> str:
    """The prompt of a request by a published template."""
    template = ChatTemplate((FOLDER / f"{name}.jinja").read_text(), SPECIAL)
    asked = (Turn(role="user", parts=(TextPart("Hi"),)),)
    request = GenerationRequest(model="m", param="messages", messages=asked, **fields)
    return template.render(
        template_messages(request.messages, template.form),
        tools=[tool_definition(tool) for tool in request.tools],
        variables=template_variables(request),
    )


def test_reasoning_is_switched_by_each_templates_own_names() -> None:
    """Of the switch, of how much, and of a call that is demanded."""
    off, low, most = (Reasoning(enabled=False), Reasoning(effort="low"), Reasoning(effort="xhigh"))
    assert prompt("Cohere2MoE", reasoning=off).endswith("<|START_THINKING|><|END_THINKING|>")
    assert prompt("Cohere2MoE").endswith("<|START_THINKING|>")
    assert prompt("MiniMax-M3", reasoning=off) != prompt("MiniMax-M3", reasoning=Reasoning(enabled=True))
    assert "Reasoning strength: low." in prompt("muse-glimmer", reasoning=low)
    assert "`thinking_effort=max`" in prompt("Kimi-K3", reasoning=most)
    assert "`thinking_effort=low`" in prompt("Kimi-K3", reasoning=low)
    tool = Tool(name="look", parameters={"type": "object"})
    assert "You MUST call tools" in prompt("Kimi-K3", tools=(tool,), tool_choice=ToolChoice("required"))
    assert "You MUST call tools" not in prompt("Kimi-K3", tools=(tool,))


def test_a_template_without_a_word_of_tools_leaves_their_format_to_the_tokens() -> None:
    """As SmolLM3's in this distribution, whose published one writes calls as Hermes does."""
    source = (FOLDER / "HuggingFaceTB-SmolLM3-3B.jinja").read_text()
    assert detect(source, added_tokens=("<tool_call>", "</tool_call>")).tool_format == "hermes"
    assert not detect(source).tool_format
