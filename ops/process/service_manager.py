"""Notices to systemd: a process is ready, runs, and ends (sd_notify). Without a unit of `Type=notify` nothing is sent."""

import os
import socket
from typing import Final

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
