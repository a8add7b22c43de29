"""What a process asks of the system that runs it: descriptors, of which each connection is one, and notices to systemd.

Past the limit of descriptors the system accepts connections that no process can serve. Without a unit of `Type=notify` no notices are sent.
"""

import contextlib
import os
import resource
import socket
from typing import Final

SOFT_MAX: Final = 65_536
"""What the soft limit is raised to at most: libraries close all descriptors below it, one by one."""

RESERVE: Final = 112
"""Descriptors that a process needs besides those of its clients: files, NATS, media, and refused connections that are being closed."""


def raise_limit() -> None:
    """Raise the soft limit to the hard one: systems start processes with 256 or 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = SOFT_MAX if hard == resource.RLIM_INFINITY else min(hard, SOFT_MAX)
    if soft != resource.RLIM_INFINITY and soft < target:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


def connections_possible(count: int) -> int:
    """`count` connections, or as many as this process may have descriptors for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or count <= soft - RESERVE:
        return count
    # Not for commands that only raise the limit.
    import structlog

    possible, log = max(1, soft - RESERVE), structlog.get_logger("headwater.process")
    log.warning(
        "connections_limited",
        wanted=count,
        possible=possible,
        reason=f"this process may have {soft} descriptors (hard limit {hard}): raise it, as by LimitNOFILE or ulimit -n",
    )
    return possible


READY: Final = "READY=1"
WATCHDOG: Final = "WATCHDOG=1"
STOPPING: Final = "STOPPING=1"


class ServiceManager:
    """What started this process and wants to know its state, if it is systemd."""

    def __init__(self, address: str | None = None) -> None:
        """`address` is that of the manager's socket, by default the one that systemd gave to this process."""
        self._address = os.environ.get("NOTIFY_SOCKET", "") if address is None else address
        self._is_ready = False

    def tell_alive(self, *, ready: bool) -> None:
        """The event loop runs; `ready`: so does the actor, and it has been ready once."""
        if not self._address:
            return
        if ready and not self._is_ready:
            self._is_ready = True
            self._send(READY)
        self._send(WATCHDOG)

    def tell_stopping(self) -> None:
        """The process ends by its own choice or because it was asked to."""
        if self._address:
            self._send(STOPPING)

    def _send(self, text: str) -> None:
        # An abstract socket is written with @ in front.
        address = f"\0{self._address[1:]}" if self._address.startswith("@") else self._address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            try:
                sender.sendto(text.encode(), address)
            except OSError:
                # It is not this process's failure that nobody listens.
                return
