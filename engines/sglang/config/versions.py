"""The installed SGLang, and releases with known vulnerabilities."""

from importlib import metadata
from typing import Final

import structlog

from headwater.engines.engine import EngineUnavailable
from headwater.engines.releases import Hole, release

OLDEST: Final = (0, 5, 17)
"""The first release that this adapter was used with."""

_log = structlog.get_logger("headwater.sglang")


HOLES: Final[tuple[Hole, ...]] = (
    Hole("CVE-2026-3059", (0, 5, 10), "unpickles data from an open port (diffusion broker)", refused=True),
    Hole(
        "CVE-2026-3060", (0, 5, 10), "unpickles data from an open port (encoder disaggregation)", refused=True
    ),
)
"""Vulnerabilities that matter behind Headwater's edge.

CVE-2026-5760 (a chat template of a GGUF file, at a rerank request) and CVE-2026-3989 (a replay script for dumped requests)
are not among them: the edge renders templates itself, in a sandbox, and the script is not part of a worker.
"""


def installed() -> str:
    """The installed version of SGLang, "" without one."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return ""


def check(version: str, *, allow: bool) -> None:
    """Raise `EngineUnavailable` for a release that is too old, or with a vulnerability unless that is allowed."""
    found = release(version)
    # Versions like 0.0.0 are builds from source without release number.
    if found is None or found < (0, 1, 0):
        return
    refused = [hole for hole in HOLES if found < hole.fixed]
    for hole in refused:
        _log.warning("sglang_vulnerable_version", version=version, cve=hole.cve, what=hole.what)
    if refused and not allow:
        worst = max(refused, key=lambda hole: hole.fixed)
        needed = ".".join(map(str, worst.fixed))
        raise EngineUnavailable(
            f"SGLang {version} has known vulnerabilities ({', '.join(hole.cve for hole in refused)}; {worst.cve}: it "
            f"{worst.what}): install {needed} or newer, or start with --sglang-allow-vulnerable-engine"
        )
    if found < OLDEST:
        _log.warning("sglang_version_old", version=version, oldest=".".join(map(str, OLDEST)))
