"""Releases of engines, and their published vulnerabilities."""

import re
from typing import NamedTuple

Release = tuple[int, int, int]


class Hole(NamedTuple):
    """A published vulnerability, fixed in release `fixed`. `refused`: affected engines are not started."""

    cve: str
    fixed: Release
    what: str
    refused: bool = False


def release(version: str) -> Release | None:
    """The numbers of a version ("0.14.1rc2+cpu" is 0.14.1), None without any, as of a build from source."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else None
