"""The task: a program with a fault is read, run, mended and run again. Each turn is an answer of the script, called for by the one before it.

What a turn's command prints at its end is the cue of the next.
"""

import json
from collections.abc import Callable, Sequence
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
    "git log --oneline",
    "true",
)
"""One call a turn, but for the first two, which are called for at once; then the answer."""

Call = tuple[str, dict[str, Any]]
"""The name of a tool, and its arguments."""

Calls = Callable[[Sequence[str]], Sequence[Call]]
"""The calls with which an agent runs commands at once."""

LONG_PROMPT: Final = "longword"
LONG: Final = "~" * 20_000
"""All tokens are the same, so that it is known what an event of its stream contains."""
REFUSED_PROMPT: Final = "refusedword"
FORBIDDEN: Final = "written.txt"
GIVEN_UP: Final = "It may not be written, so it is not."
SUMMARIZED_PROMPT: Final = "bigword"
IMAGE_PROMPT: Final = "imageword"
SIZE: Final = (64, 48)
NOTHING: Final = Answer("", "Nothing is to be done.")


def one_by_one(call: Callable[[str], Call]) -> Calls:
    """Calls of a tool that runs one command."""
    return lambda commands: [call(command) for command in commands]


def write(folder: Path) -> None:
    """The program to be mended, and another file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "add.py").write_text(PROGRAM)
    (folder / "other.py").write_text("number = 1\n")


def script(calls: Calls) -> list[Answer]:
    """The answers: the first calls for two commands at once, as models do."""
    answers = [NOTHING, Answer("taskword", _step(calls, 0, 1))]
    for number in range(2, len(COMMANDS)):
        answers.append(Answer(cue(number - 1), _step(calls, number)))
    return [*answers, Answer(cue(len(COMMANDS) - 1), DONE)]


def cue(number: int) -> str:
    """What a command prints last. It is in pieces in the command itself, which is in the prompt too."""
    return f"turn{number}ended"


def refused(calls: Calls, refusal: str) -> list[Answer]:
    """A command that the agent does not run, and what is answered to that."""
    command = f"python3 -c \"open('{FORBIDDEN}', 'w')\" || echo command'refused'"
    return [NOTHING, Answer(REFUSED_PROMPT, written(calls([command]))), Answer(refusal, GIVEN_UP)]


def summarized(calls: Calls, instruction: str) -> list[Answer]:
    """Commands whose results fill the context, until the agent demands a summary with `instruction`; then the edit, and the end.

    Agents differ in what they keep beside the summary. One that has kept the last result goes on from there.
    """
    mend = calls([f"{COMMANDS[5]}; echo mend'ed'"])
    answers = [NOTHING, Answer(SUMMARIZED_PROMPT, written(_much(calls, 0)))]
    answers += [Answer(f"much{number}ended", written(_much(calls, number + 1))) for number in range(2)]
    answers += [Answer("much2ended", written(mend)), Answer("summaryword", written(mend))]
    summary = "<state_snapshot>The task is summaryword.</state_snapshot>"
    return [*answers, Answer(instruction, f"<summary>{summary}</summary>"), Answer("mended", DONE)]


def _much(calls: Calls, number: int) -> Sequence[Call]:
    return calls([f"python3 -c \"print('many words ' * 2400)\"; echo much'{number}'ended"])


def image(path: Path) -> list[Answer]:
    """The call for a tool of Claude Code that reads an image. Other agents send it with the prompt; the engine says what it is."""
    return [NOTHING, Answer(IMAGE_PROMPT, written([("Read", {"file_path": str(path)})]))]


MESSAGES: Final = (
    "Please mend add.py: firstword",
    "Go on: secondword",
    "/ask What was it? thirdword",
    "/run python3 add.py",
    "Sum up: fourthword",
)
"""What Aider is told. It has no tools: the model writes edits, and Aider answers with what went wrong, at most three times a message."""


def edits() -> list[Answer]:
    """The script of `MESSAGES`: text that is not in the file, a wish to see a file, a syntax error, two wrong results, the right one.

    Each answer has the cue of the next, since what Aider answers by itself is not ours. A commit's message is asked for with the
    difference at the end.
    """
    return [
        NOTHING,
        Answer("firstword", "At first (stepone).\n\n" + _edit("a * b", "a + b")),
        Answer("stepone", "I would like to see `other.py` (steptwo).\n"),
        Answer("steptwo", "An edit (stepthree).\n\n" + _edit("a - b", "(a * b")),
        Answer("stepthree", "The bracket (stepfour).\n\n" + _edit("(a * b", "a * b * 3")),
        Answer("secondword", "Once more (stepfive).\n\n" + _edit("a * b * 3", "a * b * 2")),
        Answer("stepfive", "The sum (stepsix).\n\n" + _edit("a * b * 2", "a + b")),
        Answer("thirdword", "It subtracted."),
        Answer("fourthword", DONE),
        Answer("diff --git a/", "fix: Add instead of subtracting"),
    ]


EDIT_TURNS: Final = 8
"""Answers to `MESSAGES`; four edits are committed, each with a message that is asked for too."""


def _edit(old: str, new: str) -> str:
    lines = ("add.py", "```python", "<<<<<<< SEARCH", f"    return {old}", "=======", f"    return {new}")
    return "\n".join((*lines, ">>>>>>> REPLACE", "```", ""))


def _step(calls: Calls, *numbers: int) -> str:
    return written(calls([f"{COMMANDS[number]}; echo turn'{number}'ended" for number in numbers]))


def written(calls: Sequence[Call]) -> str:
    written = (json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls)
    return "The next step.\n" + "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in written)
