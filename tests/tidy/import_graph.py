"""The dependency diagram of the package: `python -m tests.tidy.import_graph [--ref REV] [--svg FILE]`.

Prints files, lines and imports of each package (folder), import cycles, and the folder with most files. Cycles are
those between modules, and those between packages; imports for type checkers count. `__init__.py` files are not
counted. `--write-docs` renews the generated part of docs/contributing/architecture.md and its pictures.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.tidy.draw import svg_of
from tests.tidy.source import ROOT, source_files, tree_of
from tests.tidy.trace_files import TITLES, trace

BEFORE = "f789cd3"
"""The last commit with flat packages."""

FILES_MAX = 15
"""Python files in a folder, without `__init__.py`."""

PAGE = ROOT / "docs" / "contributing" / "architecture.md"

_EDGES = """
import json, grimp
graph = grimp.build_graph("headwater", cache_dir=None)
print(json.dumps({module: sorted(graph.find_modules_directly_imported_by(module)) for module in sorted(graph.modules)}))
"""


@dataclass
class Package:
    """One folder: its files without `__init__.py`, their lines, and the packages that they import."""

    name: str
    files: int = 0
    lines: int = 0
    imports: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class ImportGraph:
    """Packages by name, and import cycles: each the sorted members of one strongly connected component."""

    packages: dict[str, Package]
    module_cycles: list[list[str]]
    package_cycles: list[list[str]]

    @property
    def edges(self) -> int:
        """Imports between packages, each pair counted once."""
        return sum(len(package.imports) for package in self.packages.values())

    @property
    def fullest(self) -> Package:
        """The package with most files."""
        return max(self.packages.values(), key=lambda package: package.files)


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


def read_graph(root: Path = ROOT) -> ImportGraph:
    """The graph of the source tree at `root`."""
    files = source_files(root)
    imports = module_imports(root)

    def package_of(module: str) -> str:
        return module if files[module].name == "__init__.py" else module.rpartition(".")[0]

    packages: dict[str, Package] = {}
    for module, path in files.items():
        package = packages.setdefault(package_of(module), Package(package_of(module)))
        if path.name != "__init__.py":
            package.files += 1
            package.lines += len(path.read_text().splitlines())
    for module, imported in imports.items():
        importer = package_of(module)
        packages[importer].imports |= {package_of(name) for name in imported} - {importer}
    used = {
        name for package in packages.values() for name in (*package.imports, package.name) if package.imports
    }
    packages = {name: one for name, one in packages.items() if one.files or name in used}
    return ImportGraph(
        packages, cycles(imports), cycles({name: package.imports for name, package in packages.items()})
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


def summary(graph: ImportGraph) -> list[tuple[str, str]]:
    """What the diagram says, in numbers."""
    full = [package for package in graph.packages.values() if package.files > FILES_MAX]
    return [
        ("packages (folders)", f"{len(graph.packages)}"),
        ("files", f"{sum(package.files for package in graph.packages.values()):,}"),
        ("lines", f"{sum(package.lines for package in graph.packages.values()):,}"),
        ("imports between packages", f"{graph.edges}"),
        ("import cycles between modules", f"{len(graph.module_cycles)}"),
        ("import cycles between packages", f"{len(graph.package_cycles)}"),
        ("fullest folder", f"`{graph.fullest.name}`: {graph.fullest.files} files"),
        (f"folders with more than {FILES_MAX} files", f"{len(full)}"),
    ]


def table(graph: ImportGraph) -> list[str]:
    """A Markdown table with a row for each package."""
    rows = ["| package | files | lines | imports |", "|---|--:|--:|---|"]
    for name in sorted(graph.packages):
        package = graph.packages[name]
        imported = ", ".join(f"`{one}`" for one in sorted(package.imports))
        rows.append(f"| `{name}` | {package.files} | {package.lines:,} | {imported} |")
    return rows


def report(graph: ImportGraph) -> str:
    """Numbers, cycles and table, in Markdown."""
    lines = [f"* {what}: {value}" for what, value in summary(graph)]
    for kind, several in (("modules", graph.module_cycles), ("packages", graph.package_cycles)):
        lines += [f"* cycle of {kind}: " + ", ".join(f"`{one}`" for one in members) for members in several]
    return "\n".join([*lines, "", *table(graph)])


def draw(graph: ImportGraph, title: str) -> str:
    """The diagram as an SVG document."""
    return svg_of(
        {name: package.imports for name, package in graph.packages.items()},
        {name: f"{package.files} files, {package.lines:,} lines" for name, package in graph.packages.items()},
        {name: number for number, members in enumerate(graph.package_cycles) for name in members},
        {name for name, package in graph.packages.items() if package.files > FILES_MAX},
        title,
    )


def traces(before: Path) -> str:
    """A table of the files that each trace touches, before and now, and the lists."""
    then, now = trace(before), trace()
    lines = [f"| | before (`{BEFORE}`) | now |", "|---|--:|--:|"]
    lines += [f"| {TITLES[name]} | {len(then[name])} | {len(now[name])} |" for name in now]
    for name, files in now.items():
        lines += ["", f"{TITLES[name][0].upper()}{TITLES[name][1:]}:", ""]
        lines += [
            f"{number}. `{file}`: `{function}`" for number, (file, function) in enumerate(files.items(), 1)
        ]
    return "\n".join(lines)


def write_docs(page: Path = PAGE) -> None:
    """Renew the comparison, both tables and both pictures of the page."""
    with tree_of(BEFORE) as root:
        before = read_graph(root)
        traced = traces(root)
    after = read_graph()
    for name, graph in (("before", before), ("after", after)):
        (page.parent / f"architecture-{name}.svg").write_text(draw(graph, name))
    both = [
        f"| {what} | {old} | {new} |"
        for (what, old), (_, new) in zip(summary(before), summary(after), strict=True)
    ]
    text = page.read_text()
    text = replace_part(
        text, "comparison", "\n".join([f"| | before (`{BEFORE}`) | now |", "|---|--:|--:|", *both])
    )
    text = replace_part(text, "traces", traced)
    text = replace_part(text, "before", report(before))
    text = replace_part(text, "after", report(after))
    page.write_text(text)


def replace_part(text: str, part: str, content: str) -> str:
    """`text` with what stands between the markers of `part` replaced. Raises ValueError without the markers."""
    start, end = f"<!-- {part}: generated by `make graph` -->", f"<!-- end of {part} -->"
    head, _, rest = text.partition(start)
    _, found, tail = rest.partition(end)
    if not found:
        raise ValueError(f"the page has no part {part}")
    return f"{head}{start}\n\n{content}\n\n{end}{tail}"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="dependency diagram of the package")
    parser.add_argument("--ref", help="a commit to read instead of the working tree")
    parser.add_argument("--svg", type=Path, help="file to draw the diagram into")
    parser.add_argument("--write-docs", action="store_true", help="renew docs/contributing/architecture.md")
    arguments = parser.parse_args()
    if arguments.write_docs:
        write_docs()
        return
    with tree_of(arguments.ref) as root:
        graph = read_graph(root)
    print(report(graph))
    if arguments.svg:
        arguments.svg.write_text(draw(graph, arguments.ref or "now"))


if __name__ == "__main__":
    main()
