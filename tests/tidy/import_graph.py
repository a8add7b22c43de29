"""Import cycles of the package: those between modules, and those between packages. Imports for type checkers count."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.tidy.source import ROOT, source_files

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


def package_cycles() -> tuple[list[list[str]], list[list[str]]]:
    """Cycles between the package's modules, and between its folders."""
    files = source_files()
    imports = module_imports(ROOT)

    def package_of(module: str) -> str:
        return module if files[module].name == "__init__.py" else module.rpartition(".")[0]

    packages: dict[str, set[str]] = {}
    for module, imported in imports.items():
        importer = package_of(module)
        packages.setdefault(importer, set()).update({package_of(name) for name in imported} - {importer})
    return cycles(imports), cycles(packages)


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
