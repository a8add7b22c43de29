"""The limit of descriptors: each connection is one. Past it the system accepts connections that no process can serve."""

import contextlib
import resource
from typing import Final

SOFT_MAX: Final = 65_536
"""What the soft limit is raised to at most: libraries close all descriptors below it, one by one."""

RESERVE: Final = 112
"""Descriptors that a process needs besides those of its clients: files, NATS, media, and refused connections that are being closed."""


def raise_limit() -> None:
    """Raise the soft limit to the hard one: systems start processes with 256 or 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = SOFT_MAX if hard == resource.RLIM_INFINITY else min(hard, SOFT_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connections_possible(wanted: int) -> int:
    """`wanted` connections, or as many as this process may have descriptors for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or wanted <= soft - RESERVE:
        return wanted
    # Not for commands that only raise the limit.
    import structlog

    possible, log = max(1, soft - RESERVE), structlog.get_logger("headwater.process")
    log.warning(
        "connections_limited",
        wanted=wanted,
        possible=possible,
        reason=f"this process may have {soft} descriptors (hard limit {hard}): raise it, as by LimitNOFILE or ulimit -n",
    )
    return possible
