"""The package's source files: those of the working tree, or those of an older commit."""

import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
"""The repository."""

AREAS = ("schemas", "events", "router", "engines", "actors", "ops")
"""The top-level packages, from the bottom layer to the top layer."""


@contextmanager
def tree_of(ref: str | None) -> Iterator[Path]:
    """Yield the repository's folder; with `ref`, a temporary copy of that commit."""
    if ref is None:
        yield ROOT
        return
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", ref, "src", *AREAS], check=True, capture_output=True
    ).stdout
    with TemporaryDirectory(prefix="headwater-") as folder, tarfile.open(fileobj=BytesIO(archive)) as files:
        files.extractall(folder)
        yield Path(folder)


def source_files(root: Path = ROOT) -> dict[str, Path]:
    """Path of each module by its dotted name, without the `headwater.` prefix; a package by its own name."""
    found: dict[str, Path] = {}
    for area in AREAS:
        for path in sorted((root / area).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = path
    return found
