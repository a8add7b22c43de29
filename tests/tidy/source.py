"""The package's source files."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The repository."""

AREAS = ("schemas", "events", "router", "engines", "actors", "ops")
"""The top-level packages, from the bottom layer to the top layer."""


def source_files() -> dict[str, Path]:
    """Path of each module by its dotted name, without the `headwater.` prefix; a package by its own name."""
    found: dict[str, Path] = {}
    for area in AREAS:
        for path in sorted((ROOT / area).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = path
    return found
