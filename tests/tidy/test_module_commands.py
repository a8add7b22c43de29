"""Modules that code, documentation and the Makefile run with `python -m` exist: a moved module leaves no dead command."""

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMAND = re.compile(r"""-m(?:["'],\s*["']|\s+)((?:headwater|tests|docs)\.[a-z_.]*[a-z_])""")
SUFFIXES = {".md", ".py", ".sh", ".toml", ".yaml", ".yml"}
FOLDERS = ("actors", "docs", "engines", "events", "examples", "ops", "router", "schemas", "tests")


def commands() -> dict[str, list[str]]:
    """Module names that are run, each with the files that name it."""
    found: dict[str, list[str]] = {}
    files = [ROOT / "Makefile", ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / ".ci" / "run"]
    for folder in FOLDERS:
        files += [file for file in (ROOT / folder).rglob("*") if file.suffix in SUFFIXES]
    for file in files:
        for name in COMMAND.findall(file.read_text()):
            found.setdefault(name, []).append(str(file.relative_to(ROOT)))
    return found


def test_modules_that_are_run_exist() -> None:
    """Each can be found on the path as a module or as a package with `__main__`."""
    found = commands()
    assert len(found) > 10
    missing = {name: files for name, files in found.items() if importlib.util.find_spec(name) is None}
    assert missing == {}
