"""The templates that llama.cpp's distribution carries: 70 of published models."""

from pathlib import Path

import pytest

from headwater.actors.edge.model.chat_template import ChatTemplate
from headwater.actors.edge.model.template_form import TemplateForm
from tests.templates.judge import CONVERSATIONS, EXPLAINED, SPECIAL, TOGETHER, cells, judge, renders

FOLDER = Path(__file__).parents[2] / ".templates"

BETWEEN = "what a user says between two results is a message between them"
SPOKEN = "what precedes a call is a message of its own, which the template takes for the answer"
FAULTS = {
    (
        "google-gemma-4-31B-it",
        "result without its call",
    ): "a result without its call is left out without a word",
    ("Apertus-8B-Instruct", "messages: text between results"): BETWEEN,
    ("GigaChat3-10B-A1.8B", "messages: text between results"): BETWEEN,
    ("GigaChat3.1-10B-A1.8B", "messages: text between results"): BETWEEN,
    ("google-gemma-4-31B-it", "messages: text between results"): BETWEEN,
    ("meta-llama-Llama-3.1-8B-Instruct", "messages: text between results"): BETWEEN,
    ("meta-llama-Llama-3.2-3B-Instruct", "messages: text between results"): BETWEEN,
    ("meta-llama-Llama-3.3-70B-Instruct", "messages: text between results"): BETWEEN,
    ("openai-gpt-oss-120b", "messages: text between results"): BETWEEN,
    ("Mistral-Small-3.2-24B-Instruct-2506", "responses: commentary"): SPOKEN,
    ("mistralai-Mistral-Nemo-Instruct-2407", "responses: commentary"): SPOKEN,
    (
        "openai-gpt-oss-120b",
        "responses: commentary",
    ): "what precedes a call is left out once an answer follows",
}
"""Cells that are wrong, and why."""

AS_TEXT = {
    "Apriel-1.6-15b-Thinker-fixed": "the tools are a dictionary of Python, which is taken for the call's arguments",
    "unsloth-Apriel-1.5": "the tools are a dictionary of Python, which is taken for the call's arguments",
    "Cohere2MoE": "each result has `is_error`: null, which is taken for a missing value",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": "each result has `is_error`: null, which is taken for a missing value",
}
"""Templates that render calls, and whose calls become texts nevertheless."""

NO_LISTS_APPENDED = {"Kimi-K2-Instruct", "Kimi-K2-Thinking"}
"""They append to a list at each call, which Hugging Face's sandbox refuses as well."""


def form(name: str) -> TemplateForm:
    """What a template renders."""
    return ChatTemplate((FOLDER / f"{name}.jinja").read_text(), SPECIAL).form


def test_each_conversation_is_rendered_whole() -> None:
    """88 conversations through three APIs: no word is lost, none is refused, and nothing stands for a missing value."""
    found = list(cells(FOLDER))
    assert len(found) >= 70 * len(CONVERSATIONS), "the templates are missing: make templates"
    known = FAULTS.keys() | {(name, shape) for name in EXPLAINED for shape in CONVERSATIONS}
    wrong = {
        place: cell.problem
        for cell in found
        if cell.problem and not cell.problem.endswith(TOGETHER) and (place := cell[:2]) not in known
    }
    assert not wrong


@pytest.mark.xfail(strict=True, reason="parts of a text are joined without anything between them")
def test_parts_do_not_run_into_one_word() -> None:
    """As Anthropic's blocks do not, and as those of chats do not with vLLM."""
    rendered = renders(ChatTemplate((FOLDER / "Qwen-Qwen3-0.6B.jinja").read_text(), SPECIAL))
    assert not judge(rendered, CONVERSATIONS["text parts"])


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


def _calling() -> list[object]:
    """The templates that mention calls, those with a known fault marked."""
    found: list[object] = []
    for path in sorted(FOLDER.glob("*.jinja")):
        if "tool_calls" in path.read_text() and path.stem not in NO_LISTS_APPENDED | EXPLAINED:
            reason = AS_TEXT.get(path.stem)
            marks = [pytest.mark.xfail(strict=True, reason=reason)] if reason else []
            found.append(pytest.param(path.stem, marks=marks))
    return found


@pytest.mark.parametrize("name", _calling())
def test_a_template_that_renders_calls_renders_its_own(name: str) -> None:
    """Calls are not replaced by text where the model has a format for them."""
    assert form(name).calls


@pytest.mark.xfail(
    strict=True,
    reason="the tool with which it is tried has a parameter without a description, which it demands",
)
def test_a_template_that_renders_tools_renders_its_own() -> None:
    assert form("CohereForAI-c4ai-command-r-plus-tool_use").tools
