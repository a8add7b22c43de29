"""Write the reference pages, or with `--check` compare them and exit with 1 if one is not current."""

import re
import sys
from pathlib import Path

from docs._reference import (
    cli,
    clients,
    events,
    findings,
    http_api,
    http_fields,
    log_events,
    metrics,
    subjects,
)

FOLDER = Path(__file__).resolve().parent.parent / "reference"
_BLANK_LINES = re.compile(r"\n{3,}")
NOTE = "<!-- Generated from the code by `make docs-reference`; do not edit. -->\n\n"


def pages() -> dict[str, str]:
    """File name to text of every generated page."""
    made = {
        "cli.md": cli.commands(),
        "settings.md": cli.settings(),
        "http-api.md": http_api.page(),
        "http-fields.md": http_fields.page(),
        "clients.md": clients.page(),
        "subjects.md": subjects.page(),
        "events.md": events.page(),
        "metrics.md": metrics.page(),
        "log-events.md": log_events.page(),
    }
    whole = {name: NOTE + _BLANK_LINES.sub("\n\n", text).strip() + "\n" for name, text in made.items()}
    # A guide, of which one table is made.
    return whole | {"../guides/doctor.md": findings.page()}


def main() -> int:
    """Exit status."""
    stale = [name for name, text in pages().items() if _current(name) != text]
    if "--check" in sys.argv:
        for name in stale:
            print(f"docs/reference/{name} is not current: run `make docs-reference`", file=sys.stderr)
        return 1 if stale else 0
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
    print(f"docs/reference: {len(stale)} of {len(pages())} pages changed")
    return 0


def _current(name: str) -> str:
    path = FOLDER / name
    return path.read_text() if path.is_file() else ""


if __name__ == "__main__":
    sys.exit(main())
