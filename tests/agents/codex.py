"""What models write for Codex's tools.

Under the names of its newer models Codex is in "code mode": one custom tool takes a program in JavaScript, which calls the others.
"""

import json
from collections.abc import Sequence
from typing import Final

from tests.agents.task import DONE, NOTHING, Call, written
from tests.support.engines.scripted import Answer

CODE_MODEL: Final = "gpt-6.2-sol"
EXEC: Final = "functions__exec"
"""The custom tool, as the model sees it: `exec` of the namespace `functions`."""


def command(line: str) -> Call:
    """A call for one command, outside of code mode."""
    return "exec_command", {"cmd": line}


def program(source: str) -> Call:
    """A call for a program, in code mode."""
    return EXEC, {"input": source}


def programs(commands: Sequence[str]) -> list[Call]:
    """One program that runs all commands at once, and shows what they print and how they end."""
    return [
        program(
            '// @exec: {"yield_time_ms": 30000}\n'
            f"const commands = {json.dumps(commands)};\n"
            "const results = await Promise.all(commands.map((cmd) => tools.exec_command({ cmd })));\n"
            "for (const { output, exit_code } of results) text(`${output}\\nexit code ${exit_code}`);\n"
        )
    ]


PATCH: Final = """\
*** Begin Patch
*** Update File: add.py
@@
-    return a - b
+    return a + b
*** End Patch"""
PROGRAMS_PROMPT: Final = "codeword"
LOOK_PROMPT: Final = "lookword"
TEAM_PROMPT: Final = "teamword"


def other_programs() -> list[Answer]:
    """The script of programs that do more than run commands.

    One has a second result, before its own, and mends the file with a patch. One goes on while the model is asked what to do, and is
    waited for: Codex counts its programs. One is no JavaScript, and one fails.
    """
    patching = f'notify("noted");\nawait tools.apply_patch({json.dumps(PATCH)});\ntext("patch" + "ended");\n'
    slow = '// @exec: {"yield_time_ms": 100}\nawait tools.exec_command({ cmd: "sleep 2" });\ntext("slow" + "ended");\n'
    waiting = ("functions__wait", {"cell_id": "2", "yield_time_ms": 20_000})
    return [
        NOTHING,
        Answer(PROGRAMS_PROMPT, written([program(patching)])),
        Answer("patchended", written([program(slow)])),
        Answer("Script running with cell ID 2", written([waiting])),
        Answer("slowended", written([program("tools.exec_command(")])),
        Answer("SyntaxError", written([program("await tools.nothing();")])),
        Answer("TypeError", DONE),
    ]


def looking(picture: str) -> list[Answer]:
    """The script of a program whose result is an image."""
    source = (
        f"const seen = await tools.view_image({{ path: {json.dumps(picture)} }});\nimage(seen.image_url);\n"
    )
    return [NOTHING, Answer(LOOK_PROMPT, written([program(source)]))]


def team() -> list[Answer]:
    """The script of an agent that has another one look into something, and waits for its answer."""
    second = {"task_name": "second", "message": "Look into it: secondword", "fork_turns": "none"}
    return [
        NOTHING,
        Answer(TEAM_PROMPT, written([("collaboration__spawn_agent", second)])),
        Answer(
            '"task_name":"/root/second"', written([("collaboration__wait_agent", {"timeout_ms": 60_000})])
        ),
        Answer("secondword", "It has been looked into: foundword."),
        Answer("foundword", DONE),
    ]
