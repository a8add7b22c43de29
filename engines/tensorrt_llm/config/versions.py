"""The installed TensorRT-LLM, and releases with known vulnerabilities."""

from importlib import metadata
from typing import Final

from headwater.engines.releases import Vulnerability, check_release

OLDEST: Final = (1, 2, 0)
"""The first release whose API this adapter was written from."""

VULNERABILITIES: Final[tuple[Vulnerability, ...]] = (
    Vulnerability(
        "CVE-2025-23254", (0, 18, 2), "unpickles what any local user sends to its executor", refused=True
    ),
)
"""Vulnerabilities that matter behind Headwater's edge."""


def installed() -> str:
    """The installed version of TensorRT-LLM, "" without one."""
    try:
        return metadata.version("tensorrt-llm")
    except metadata.PackageNotFoundError:
        return ""


def check(version: str, *, allow: bool) -> None:
    """Raises `EngineUnavailable` for a release with a vulnerability, unless that is allowed."""
    check_release(
        "TensorRT-LLM",
        version,
        VULNERABILITIES,
        allow=allow,
        flag="--tensorrt-llm-allow-vulnerable-engine",
        oldest=OLDEST,
    )
