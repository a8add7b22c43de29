"""Tables, and docstrings as Markdown."""

import inspect
import re
from collections.abc import Iterable, Sequence

_ROLE = re.compile(r"``([^`]+)``")


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    lines += ["| " + " | ".join(cell(text) for text in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def cell(text: str) -> str:
    """Text that does not end its cell."""
    return text.replace("|", "\\|").replace("\n", " ").strip()


def code(text: object) -> str:
    """Inline code, empty for an empty text."""
    return f"`{text}`" if str(text) else ""


def doc(thing: object) -> str:
    """Docstring of a class or module, of itself only."""
    own = getattr(thing, "__doc__", None) or ""
    return _ROLE.sub(r"`\1`", inspect.cleandoc(own))
