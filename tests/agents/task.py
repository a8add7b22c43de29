"""The task: a program with a fault is read, run, mended and run again. Each turn is an answer of the script, called for by the one before it.

What a turn's command prints at its end is the cue of the next.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tests.support.engines.scripted import Answer

PROMPT: Final = "Please mend add.py: taskword"
PROGRAM: Final = "def add(a, b):\n    return a - b\n\n\nassert add(2, 2) == 4, 'addition is wrong'\n"
MENDED: Final = PROGRAM.replace("a - b", "a + b")
DONE: Final = "The program is mended: add returns the sum."

COMMANDS: Final = (
    "ls",
    "cat add.py",
    "wc -l add.py",
    "python3 add.py",  # fails
    "git status --short",
    "sed -i 's/a - b/a + b/' add.py",
    "cat add.py",
    "python3 add.py",
    "git diff --stat",
)
"""One call a turn; then the answer."""

Call = Callable[[str], tuple[str, dict[str, Any]]]
"""The name and the arguments of an agent's tool that runs a command."""


def write(folder: Path) -> None:
    """The program to be mended."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "add.py").write_text(PROGRAM)


def script(call: Call) -> list[Answer]:
    """The answers: the first calls for two commands at once, as models do."""
    answers = [Answer("", "Nothing is to be done."), Answer("taskword", _written(call, 0, 1))]
    for number in range(2, len(COMMANDS)):
        answers.append(Answer(cue(number - 1), _written(call, number)))
    return [*answers, Answer(cue(len(COMMANDS) - 1), DONE)]


def cue(number: int) -> str:
    """What a command prints last. It is in pieces in the command itself, which is in the prompt too."""
    return f"turn{number}ended"


def _written(call: Call, *numbers: int) -> str:
    calls = []
    for number in numbers:
        name, arguments = call(f"{COMMANDS[number]}; echo turn'{number}'ended")
        calls.append(f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>")
    return "The next step.\n" + "\n".join(calls)
