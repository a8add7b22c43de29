"""Releases of engines, and their published vulnerabilities."""

import contextlib
import re
from collections.abc import Iterable
from importlib import metadata
from typing import Final, NamedTuple

import structlog

from headwater.engines.engine import EngineUnavailable

_log = structlog.get_logger("headwater.engine")

Release = tuple[int, int, int]


class Vulnerability(NamedTuple):
    """A published vulnerability, fixed in release `fixed`. `refused`: affected engines are not started."""

    cve: str
    fixed: Release
    what: str
    refused: bool = False


SGLANG_DIFFUSION_BROKER: Final = Vulnerability(
    "CVE-2026-3059", (0, 5, 10), "unpickles data from an open port (diffusion broker)", refused=True
)
"""SGLang starts that broker with its server for language models and with that for diffusion models."""


def release(version: str) -> Release | None:
    """The numbers of a version ("0.14.1rc2+cpu" is 0.14.1), None without any, as of a build from source."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else None


def open_vulnerabilities(version: str, known: Iterable[Vulnerability]) -> list[Vulnerability]:
    """Those that a release has; none of a build from source without a release number, such as 0.0.0."""
    found = release(version)
    return [one for one in known if found is not None and (0, 1, 0) <= found < one.fixed]


class Releases(NamedTuple):
    """What is known of an engine's releases. `engine` is its name for users, `distributions` are those that it is installed as.

    `vulnerabilities` are those that matter behind Headwater's edge; `flag` starts an affected release nevertheless. `oldest` is the first
    that the adapter was written for.
    """

    engine: str = ""
    distributions: tuple[str, ...] = ()
    vulnerabilities: tuple[Vulnerability, ...] = ()
    flag: str = ""
    oldest: Release = (0, 0, 0)

    def installed(self) -> str:
        """Return the installed version, "" without one."""
        for name in self.distributions:
            with contextlib.suppress(metadata.PackageNotFoundError):
                return metadata.version(name)
        return ""

    def check(self, version: str, *, allow: bool) -> None:
        """Log the vulnerabilities of an installed release, and whether it is older than what the adapter was written for.

        Raises `EngineUnavailable` if one of them is refused, unless `allow`.
        """
        found = release(version)
        # Versions like 0.0.0 are builds from source without release number.
        if found is None or found < (0, 1, 0):
            return
        open_ = open_vulnerabilities(version, self.vulnerabilities)
        for one in open_:
            _log.warning(
                "vulnerable_version", engine=self.engine, version=version, cve=one.cve, what=one.what
            )
        refused = [one for one in open_ if one.refused]
        if refused and not allow:
            worst = max(refused, key=lambda one: one.fixed)
            needed = ".".join(map(str, worst.fixed))
            raise EngineUnavailable(
                f"{self.engine} {version} has known vulnerabilities ({', '.join(one.cve for one in refused)}; {worst.cve}: it "
                f"{worst.what}): install {needed} or newer, or start with {self.flag}"
            )
        if found < self.oldest:
            oldest = ".".join(map(str, self.oldest))
            _log.warning("old_version", engine=self.engine, version=version, oldest=oldest)
