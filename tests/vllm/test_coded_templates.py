"""Our chat templates of models that are published with a program instead, beside that program as vLLM runs it."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from headwater.actors.edge.chat_template import ChatTemplate
from headwater.engines.model_files import CODED, coded_template
from tests.templates.conversations import Conversation

if TYPE_CHECKING:
    from tests.templates.coded import Pair

FOLDER: Final = Path(__file__).parents[2] / ".templates"

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm")]

WORDS_RUN_TOGETHER: Final = frozenset({"two systems", "system and developer", "system last"})
"""Ours puts an empty line between two texts, the program nothing."""

DEVELOPER: Final = frozenset({"developer", "system and developer"})
"""The program shows it as a user's, and leaves it out where the model reasons: here it is a system message."""

UNREADABLE_ARGUMENTS: Final = frozenset(
    {
        *("broken arguments", "arguments are a text", "arguments of two objects", "arguments of a list"),
        *("arguments with NaN", "arguments with a lone surrogate"),
    }
)
"""Arguments that are no object are lost by the program, and the value of a key here."""

SENT_OTHERWISE: Final = frozenset(
    {
        *("refusal in history", "tool choice none", "tool choice none behind a loop"),
        *("assistant last", "assistant last, continued", "assistant in parts last, continued"),
        "assistant with reasoning last, continued",
    }
)
"""vLLM loses a refusal, offers tools that are not to be called, and ends an answer that is to be continued."""

ANY: Final = WORDS_RUN_TOGETHER | DEVELOPER | UNREADABLE_ARGUMENTS | SENT_OTHERWISE

DIFFERENT: Final = {
    # The program takes a system message anywhere, without a mark, and tools in one of their own; it refuses a result alone.
    "deepseek_v32": {
        *("late system", "late system behind a loop", "system and loop", "results out of order"),
        "result without its call",
    },
    # Parts of one message are lines of it here.
    "deepseek_v4": {"late system behind a loop", "text parts", "system in parts", "assistant in parts"},
}

TEMPLATES: Final = {"deepseek_v32": "deepseek-ai-DeepSeek-V3.2", "deepseek_v4": "deepseek-ai-DeepSeek-V4"}


def program(name: str) -> "Pair":
    """The program of a model. It imports vLLM, which other tests of this module's worker have."""
    from tests.templates.coded import pairs

    return next(pair for pair in pairs(FOLDER, None, None) if pair.template == TEMPLATES[name])


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("effort", [None, "low", "max"])
@pytest.mark.parametrize("name", CODED)
def test_prompts_are_those_of_the_program(name: str, effort: str | None, thinking: bool) -> None:
    """Word for word, for all chats but those named above."""
    from tests.templates.coded import compare

    pair = program(name)
    variables: dict[str, Any] = {"thinking": thinking}
    if effort:
        variables["reasoning_effort"] = effort

    def with_variables(given: Conversation) -> Conversation:
        return given._replace(body={**given.body, "chat_template_kwargs": variables})

    found = compare(pair, coded_template(name), with_variables)
    different = {conversation for conversation, (ours, theirs) in found.items() if ours != theirs}
    assert not different - ANY - DIFFERENT[name]
    assert len(found) - len(different) >= 37


@pytest.mark.parametrize("name", CODED)
def test_system_messages_and_developers_are_rendered(name: str) -> None:
    form = ChatTemplate(coded_template(name), program(name).special_tokens).form
    assert (form.system, form.several_systems, form.calls, form.tools, form.developer) == (*[True] * 4, False)
