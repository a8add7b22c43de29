"""What the pages show is what the commands print: every `console` and `python` block is run against one simulated fleet."""

from functools import partial
from pathlib import Path

import pytest

from tests.docs.conftest import Shell
from tests.docs.expected import matches
from tests.docs.pages import PAGES, ROOT, Block, Command, blocks, commands, shows_commands

NOT_RUN_MAX = 34
"""Blocks of commands and programs that no test runs. Each names its reason."""

RUNNABLE = {"console", "python"}
SHELL = {"sh", "bash", "shell"}
INTERRUPTED = (0, 130, -2)
"""How a command may end after Ctrl-C."""

REFERENCE = ROOT / "docs" / "reference"
"""Generated; its examples are those of the help."""

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("docs")]


def is_run(block: Block) -> bool:
    """Is it something that a test can run, and not excepted?"""
    return block.language in RUNNABLE and (block.mark is None or block.mark[0] != "not run")


TEACHING = {"docs/guides/benchmarking.md"}
"""Pages whose commands send so many requests that routers know the times of prefills afterwards: other pages show what they say before."""

_with_commands = [
    page for page in PAGES if any(map(is_run, blocks(page))) and str(page.relative_to(ROOT)) not in TEACHING
]


@pytest.mark.parametrize("page", _with_commands, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_print_what_the_page_shows(page: Path, shell: Shell) -> None:
    """Commands of a page run in order, in one folder. Pages run in any order: what others did may be in the log."""
    run_page(page, shell)


def run_page(page: Path, shell: Shell) -> None:
    """Run the blocks of a page, and compare what they print. Fails naming the block."""
    for block in filter(is_run, blocks(page)):
        if block.language == "python":
            status, output = shell.python(block.text)
            assert status == 0, f"{block}\n{output}"
        else:
            _run(block, shell)


def _run(block: Block, shell: Shell) -> None:
    found = commands(block)
    assert found, f"{block}: a console block without a line that begins with `$ `"
    vary = block.mark == ("output", "numbers vary")
    for command in found:
        if command.interrupted:
            status, output = shell.run_until(command.line, partial(_prints, command, vary))
        else:
            status, output = shell.run(command.line)
        shown = f"{block}: $ {command.line}\nexit status {status}\n--- the page\n{command.output}--- now\n{output}"
        assert status in INTERRUPTED if command.interrupted else status == 0, shown
        assert _prints(command, vary, output), shown


def _prints(command: Command, vary: bool, output: str) -> bool:
    return matches(command.output, output, numbers_vary=vary)


def test_what_is_not_run_is_marked_and_rare() -> None:
    """A block of commands or a program that is not run says why, and there are few."""
    not_run = [
        block
        for page in PAGES
        if page.parent != REFERENCE
        for block in blocks(page)
        if not is_run(block) and (block.language in RUNNABLE | SHELL or shows_commands(block))
    ]
    unmarked = [str(b) for b in not_run if b.mark is None or b.mark[0] != "not run"]
    assert not unmarked, f"without a comment `<!-- not run: REASON -->` on the line before: {unmarked}"
    assert len(not_run) <= NOT_RUN_MAX
