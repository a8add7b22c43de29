"""The installed SGLang, and releases with known vulnerabilities."""

from importlib import metadata
from typing import Final

from headwater.engines.releases import SGLANG_DIFFUSION_BROKER, Vulnerability, check_release

OLDEST: Final = (0, 5, 17)
"""The first release that this adapter was used with."""


VULNERABILITIES: Final[tuple[Vulnerability, ...]] = (
    SGLANG_DIFFUSION_BROKER,
    Vulnerability(
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
    """See `check_release`. Raises `EngineUnavailable`."""
    flag = "--sglang-allow-vulnerable-engine"
    check_release("SGLang", version, VULNERABILITIES, allow=allow, flag=flag, oldest=OLDEST)
