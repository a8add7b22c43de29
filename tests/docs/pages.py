"""The pages of the documentation, and the code blocks in them."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted(p for p in (ROOT / "docs").rglob("*.md") if "_build" not in p.parts),
    *sorted((ROOT / "examples").rglob("*.md")),
)

_FENCE = re.compile(r"^(```+)([^\n`]*)\n(.*?)^\1$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"(?:\$|(?:headwater|make|pip|uv|docker|curl|python3? -m) )")
_MARK = re.compile(r"<!-- (not run|output): ([^>]+?) -->\n\Z")


class Block(NamedTuple):
    """One fenced block. `mark` is the comment on the line before it, such as ("not run", "needs a GPU")."""

    page: Path
    line: int
    language: str
    text: str
    mark: tuple[str, str] | None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


class Command(NamedTuple):
    """One command of a `console` block, and the output that the page shows. `interrupted`: it runs until Ctrl-C, which the page shows as `^C`."""

    line: str
    output: str
    interrupted: bool = False


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    text = page.read_text()
    found = []
    for fence in _FENCE.finditer(text):
        mark = _MARK.search(text[: fence.start()])
        line = text[: fence.start()].count("\n") + 1
        found.append(Block(page, line, fence[2], fence[3], (mark[1], mark[2]) if mark is not None else None))
    return found


def commands(block: Block) -> list[Command]:
    """The commands of a `console` block: lines that begin with `$ `, each with the lines up to the next."""
    found: list[Command] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            found.append(Command(line[2:], ""))
        elif found:
            last = found.pop()
            if line == "^C":
                found.append(last._replace(interrupted=True))
            else:
                found.append(last._replace(output=last.output + line + "\n"))
    return found


def shows_commands(block: Block) -> bool:
    """Does it begin with something to type into a shell, whatever its language says?"""
    return _COMMAND.match(block.text) is not None


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return _FENCE.sub("", page.read_text())
