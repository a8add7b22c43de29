"""The layout of the package: sizes of files, import cycles, and where facts are spelled."""

import ast
import gc
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import headwater
import headwater.events.ports
from headwater.engines import registry
from tests.tidy.import_graph import cycles, import_cycles
from tests.tidy.source import AREAS, ROOT, source_files

LINES_MAX = 600
FUNCTION_LINES_MAX = 60
LOG_EVENTS = ROOT / "docs" / "reference" / "log-events.md"
LOGGERS = re.compile(r"(self\.)?(_\w+)?_?log")
LOG_METHODS = {"debug", "info", "warning", "error", "critical", "exception"}

OUR_SUBJECTS = re.compile(r"hw\.|HW_|_INBOX_")
NATS_SUBJECTS = re.compile(r"\$(KV|O|JS|SRV)\b")
SPELLS_ENGINES = {
    "ops.bench": "measures with the simulated engine, and names in help and docstrings what is measured, and what defines the measures",
    "ops.sim": "simulates",
    "ops.whatif": "simulates",
    "ops.launch.up": "a fleet of simulated engines",
    "ops.commands": "the command `sim`, and an example in help",
    "ops.config.worker": "help: other names of formats of tool calls, and block sizes",
    "ops.diagnosis": "remedies name what operators change in an engine they run, and patterns are what its log says",
}
"""Modules and packages of ops that name engines, and why."""

SERVER_API = ("events.jetstream", "schemas.permissions")


@cache
def sources() -> dict[str, str]:
    """The text of each module of the package."""
    return {module: path.read_text() for module, path in source_files().items()}


@cache
def parsed(module: str) -> ast.Module:
    """The syntax tree of a module of the package. Parsing takes milliseconds: search `sources` first."""
    return parse(sources()[module])


def parse(text: str) -> ast.Module:
    """Parse without collections: Python 3.11 raises SystemError if something else parses during a parse, and a traceback
    that is written because of an object collected then does so.
    """
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        gc.enable()


def long_functions(tree: ast.Module) -> dict[str, int]:
    """Lines of each function that has too many, from `def` to its end: the cases that decorate a test are not in it."""
    return {
        f"{node.name}:{node.lineno}": lines
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
        if (lines := node.end_lineno - node.lineno + 1) > FUNCTION_LINES_MAX
    }


def strings(module: str) -> Iterator[tuple[int, str]]:
    """(line, value) of each string, also within f-strings, that is not a docstring."""
    documentation = {id(node.value) for node in ast.walk(parsed(module)) if isinstance(node, ast.Expr)}
    for node in ast.walk(parsed(module)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.lineno, node.value


@cache
def logged_events() -> dict[str, str]:
    """Where each log event is written, by its name."""
    found: dict[str, str] = {}
    for module in (module for module, text in sources().items() if "log." in text):
        for node in ast.walk(parsed(module)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in LOG_METHODS
                and LOGGERS.fullmatch(ast.unparse(node.func.value))
                and node.args
                and isinstance(node.args[0], ast.Constant)
            ):
                found.setdefault(str(node.args[0].value), f"{module}:{node.lineno}")
    return found


def test_nothing_is_imported_under_its_bare_name() -> None:
    """A second module object of one file would have its own classes."""
    assert headwater.__version__
    assert not set(AREAS) & set(sys.modules)


def test_no_file_is_too_long() -> None:
    paths = [*source_files().values(), *sorted((ROOT / "tests").rglob("*.py"))]
    long = {
        str(path.relative_to(ROOT)): lines
        for path in paths
        if (lines := len(path.read_text().splitlines())) > LINES_MAX
    }
    assert not long, long


def test_no_function_is_too_long() -> None:
    paths = [*source_files().values(), *sorted((ROOT / "tests").rglob("*.py"))]
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in paths}
    long = {
        f"{path}:{function}": lines
        for path, text in texts.items()
        if text.count("\n") > FUNCTION_LINES_MAX
        for function, lines in long_functions(parse(text)).items()
    }
    assert not long, long


def test_long_functions_are_found() -> None:
    """Also coroutines, methods, and functions within others; decorators do not count."""
    whole = "    x = 0\n" * (FUNCTION_LINES_MAX - 1)
    nested = (
        "class A:\n    def b(self):\n        async def c():\n" + "            x = 0\n" * FUNCTION_LINES_MAX
    )
    decorated = "@case(\n    1,\n)\ndef a():\n"
    assert not long_functions(parse(decorated + whole))
    assert long_functions(parse(decorated + whole + "    x = 0\n")) == {"a:4": 61}
    assert long_functions(parse(nested)) == {"b:2": 62, "c:3": 61}


def test_there_are_no_import_cycles() -> None:
    """Between modules, and between what is in one folder. Imports for type checkers count: a reader follows those as well."""
    assert import_cycles() == ([], [])
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a", "e"}, "e": set()}) == [["a", "b", "c"]]


def test_subjects_are_spelled_in_one_place() -> None:
    """`schemas.subjects`; those of the server's API also where it is called, and where calls of it are permitted."""
    spelled = [
        f"{module}:{line}: {string!r}"
        for module, text in sources().items()
        if module != "schemas.subjects" and (OUR_SUBJECTS.search(text) or NATS_SUBJECTS.search(text))
        for line, string in strings(module)
        if OUR_SUBJECTS.match(string) or (NATS_SUBJECTS.match(string) and not module.startswith(SERVER_API))
    ]
    assert not spelled


def test_ops_spells_no_engine_except_for_a_reason() -> None:
    """What is to be known of an engine is in its package, so that a new one changes no line of ops."""
    titles = {traits.title for traits in registry.all_traits().values()} - {""}
    names = (registry.all_traits().keys() | titles) - {"sim", "Simulated engine"}
    spelled = re.compile(
        "|".join([*map(re.escape, names), r"[\"']sim[\"']", r"engines\.sim\b"]), re.IGNORECASE
    )
    found = {
        module for module, text in sources().items() if module.startswith("ops.") and spelled.search(text)
    }
    allowed = {module for module in found for place in SPELLS_ENGINES if f"{module}.".startswith(f"{place}.")}
    assert found == allowed
    unused = [
        place for place in SPELLS_ENGINES if not any(f"{one}.".startswith(f"{place}.") for one in found)
    ]
    assert not unused


def test_every_log_event_has_a_row_in_the_reference() -> None:
    text = LOG_EVENTS.read_text()
    missing = {event: where for event, where in logged_events().items() if f"`{event}`" not in text}
    assert not missing


def test_log_events_are_found() -> None:
    assert "lease_lost" in logged_events()


def test_no_python_file_lies_outside_a_package() -> None:
    lost = [
        str(path.relative_to(ROOT))
        for area in AREAS
        for path in (ROOT / area).rglob("*.py")
        if not Path(path.parent, "__init__.py").exists()
    ]
    assert not lost
