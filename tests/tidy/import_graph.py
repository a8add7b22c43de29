"""Import cycles of the package: those between modules, and those between what is in one folder. Imports for type checkers count."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.tidy.source import ROOT

_EDGES = """
import json, grimp
graph = grimp.build_graph("headwater", cache_dir=None)
print(json.dumps({module: sorted(graph.find_modules_directly_imported_by(module)) for module in sorted(graph.modules)}))
"""


def module_imports(root: Path) -> dict[str, set[str]]:
    """Modules that each module imports, as grimp finds them; names without the `headwater.` prefix."""
    # In a process of its own: grimp finds a package by the import path.
    answer = subprocess.run(
        [sys.executable, "-c", _EDGES],
        env={**os.environ, "PYTHONPATH": str(root / "src")},
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    prefix = "headwater."
    return {
        module.removeprefix(prefix): {name.removeprefix(prefix) for name in imported if name != "headwater"}
        for module, imported in json.loads(answer).items()
        if module != "headwater"
    }


def import_cycles() -> tuple[list[list[str]], list[list[str]]]:
    """Cycles between the package's modules, and, in each folder, between what is directly in it."""
    imports = module_imports(ROOT)
    siblings: dict[str, dict[str, set[str]]] = {}
    for module, imported in imports.items():
        for other in imported:
            folder, one, two = first_difference(module, other)
            if one and two:
                siblings.setdefault(folder, {}).setdefault(one, set()).add(two)
    return cycles(imports), [found for graph in siblings.values() for found in cycles(graph)]


def first_difference(module: str, other: str) -> tuple[str, str, str]:
    """The folder that two modules share, and under which name each is in it; "" for the folder itself."""
    one, two = module.split("."), other.split(".")
    shared = 0
    while shared < min(len(one), len(two)) and one[shared] == two[shared]:
        shared += 1
    folder = ".".join(one[:shared])
    return (
        folder,
        ".".join(one[: shared + 1]) if len(one) > shared else "",
        ".".join(two[: shared + 1]) if len(two) > shared else "",
    )


def cycles(imports: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Strongly connected components with more than one member (Tarjan), sorted."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    on_stack: set[str] = set()
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        on_stack.add(name)
        for imported in imports.get(name, ()):
            if imported not in index:
                visit(imported)
                low[name] = min(low[name], low[imported])
            elif imported in on_stack:
                low[name] = min(low[name], index[imported])
        if low[name] == index[name]:
            component: list[str] = []
            while not component or component[-1] != name:
                component.append(stack.pop())
                on_stack.discard(component[-1])
            if len(component) > 1:
                found.append(sorted(component))

    for name in imports:
        if name not in index:
            visit(name)
    return sorted(found)
