"""What the pages show is what the commands print: every `console` block is run against one simulated fleet."""

from pathlib import Path

import pytest

from tests.docs.conftest import Shell
from tests.docs.expected import matches
from tests.docs.pages import PAGES, ROOT, Block, blocks, commands

NOT_RUN_MAX = 25
"""Blocks of shell commands that no test runs. Each names its reason."""

RUNNABLE = {"console"}
SHELL = {"sh", "bash", "shell"}

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("docs")]

_with_commands = [page for page in PAGES if any(b.language in RUNNABLE for b in blocks(page))]


@pytest.mark.parametrize("page", _with_commands, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_print_what_the_page_shows(page: Path, shell: Shell) -> None:
    """Commands of a page run in order, in one folder. Pages run in any order: what others did may be in the log."""
    for block in blocks(page):
        if block.language in RUNNABLE:
            _run(block, shell)


def _run(block: Block, shell: Shell) -> None:
    found = commands(block)
    assert found, f"{block}: a console block without a line that begins with `$ `"
    vary = block.mark == ("output", "numbers vary")
    for command in found:
        status, output = shell.run(command.line)
        shown = f"{block}: $ {command.line}\nexit status {status}\n--- the page\n{command.output}--- now\n{output}"
        assert status == 0, shown
        assert matches(command.output, output, numbers_vary=vary), shown


def test_what_is_not_run_is_marked_and_rare() -> None:
    """A block of shell commands that is not run says why, and there are few."""
    not_run = [block for page in PAGES for block in blocks(page) if block.language in SHELL]
    unmarked = [str(b) for b in not_run if b.mark is None or b.mark[0] != "not run"]
    assert not unmarked, f"without a comment `<!-- not run: REASON -->` on the line before: {unmarked}"
    assert len(not_run) <= NOT_RUN_MAX
