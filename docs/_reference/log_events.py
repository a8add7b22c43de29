"""Log events: which the code logs, and what each means (`log_events.toml`)."""

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from docs._reference.markdown import code, table
from headwater.engines.logs import FIELDS, FIRST

ROOT = Path(__file__).resolve().parent.parent.parent
AREAS = ("actors", "engines", "events", "ops", "router", "schemas")
LEVELS = ("debug", "info", "warning", "error", "exception", "critical")
_LOGGERS = {"_log", "log", "logger", "_logger"}
_NAME = re.compile(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)*")
_HEAD = """
# Log events

Every log line has an `event`, a level and fields; `--log-format json` prints them as JSON, one object a line ([Logs](../guides/logs.md)). The level `exception` is an error with a traceback. Names are stable:
a renamed event is named in the changelog.
"""


class LogEvent(NamedTuple):
    """One event: its levels, the files that log it, and its fields."""

    name: str
    levels: tuple[str, ...]
    files: tuple[str, ...]
    fields: tuple[str, ...]


def page() -> str:
    """The whole page. Raises `ValueError` for an event that is logged and not described, or described and not logged."""
    meanings, events = read(), logged()
    if wrong := meanings.keys() ^ {event.name for event in events}:
        raise ValueError(f"logged without a description, or described without being logged: {sorted(wrong)}")
    rows = []
    for event in events:
        meaning, action = meanings[event.name]
        rows.append(
            (
                code(event.name),
                ", ".join(event.levels),
                meaning,
                action,
                " ".join(code(field) for field in event.fields),
            )
        )
    fields = [(", ".join(map(code, name.split(", "))), meaning) for name, meaning in FIELDS.items()]
    every = " ".join(code(name) for name in FIRST)
    return "\n".join(
        (
            _HEAD,
            f"## Fields of all events\n\nEach line has {every}; the others where they are known.\n",
            table(("field", "meaning"), fields),
            "## Events\n",
            table(("event", "level", "meaning", "action", "fields"), rows),
        )
    )


def read() -> dict[str, tuple[str, str]]:
    """Meaning and action of each event that is described."""
    described = tomllib.loads((Path(__file__).parent / "log_events.toml").read_text())
    return {name: (meaning, action) for name, (meaning, action) in described.items()}


def logged() -> list[LogEvent]:
    """Every event that the code logs, by name."""
    levels: dict[str, set[str]] = {}
    files: dict[str, set[str]] = {}
    fields: dict[str, set[str]] = {}
    for area in AREAS:
        for path in sorted((ROOT / area).rglob("*.py")):
            text = path.read_text()
            if not any(f".{level}" in text for level in LEVELS):
                continue
            for name, level, given in _calls(ast.parse(text)):
                levels.setdefault(name, set()).add(level)
                files.setdefault(name, set()).add(str(path.relative_to(ROOT)))
                fields.setdefault(name, set()).update(given)
    return [
        LogEvent(
            name,
            tuple(sorted(levels[name], key=LEVELS.index)),
            tuple(sorted(files[name])),
            tuple(sorted(fields[name])),
        )
        for name in sorted(levels)
    ]


def _calls(tree: ast.AST) -> Iterator[tuple[str, str, list[str]]]:
    """(event, level, fields) of each call of a logger. Raises `ValueError` for one whose event is no name."""
    nodes = list(ast.walk(tree))
    aliases = dict(_aliases(nodes))
    for node in nodes:
        if not (isinstance(node, ast.Call) and node.args):
            continue
        method, first = node.func, node.args[0]
        levels = aliases.get(method.id, []) if isinstance(method, ast.Name) else _levels(method)
        if not levels:
            continue
        name = first.value if isinstance(first, ast.Constant) else None
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(
                f"line {node.lineno} logs {ast.unparse(first)}, which is not the name of an event"
            )
        given = [keyword.arg for keyword in node.keywords if keyword.arg and keyword.arg != "exc_info"]
        yield from ((name, level, given) for level in levels)


def _aliases(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, list[str]]]:
    """Variables that hold a method of a logger: `log = _log.warning if … else _log.info`."""
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value = node.value
            sides = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
            levels = [level for side in sides for level in _levels(side)]
            if levels:
                yield node.targets[0].id, levels


def _levels(method: ast.expr) -> list[str]:
    """The level, if this is a method of a logger."""
    if not isinstance(method, ast.Attribute) or method.attr not in LEVELS:
        return []
    name = ast.unparse(method.value).split(".")[-1]
    return [method.attr] if name in _LOGGERS or name.endswith("_log") else []
