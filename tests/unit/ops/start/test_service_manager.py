"""Notices to systemd."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.ops.start.system import ServiceManager


@pytest.fixture(params=["file", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, socket.socket]]:
    """The address of a socket, as systemd writes it, and the socket."""
    path = str(tmp_path / "notify") if request.param == "file" else f"@headwater-test-{tmp_path.name}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(path.replace("@", "\0", 1) if path.startswith("@") else path)
        listener.setblocking(False)
        yield path, listener


def received(listener: socket.socket) -> list[str]:
    """All notices so far."""
    found = []
    while True:
        try:
            found.append(listener.recv(100).decode())
        except BlockingIOError:
            return found


def test_it_is_ready_once_and_alive_from_the_start(manager: tuple[str, socket.socket]) -> None:
    address, listener = manager
    service = ServiceManager(address)
    for ready in (False, True, False, True):
        service.tell_alive(ready=ready)
    service.tell_stopping()
    assert received(listener) == [
        "WATCHDOG=1",
        "READY=1",
        "WATCHDOG=1",
        "WATCHDOG=1",
        "WATCHDOG=1",
        "STOPPING=1",
    ]


def test_nothing_happens_without_systemd_or_when_it_is_gone(tmp_path: Path) -> None:
    for address in ("", str(tmp_path / "nobody")):
        service = ServiceManager(address)
        service.tell_alive(ready=True)
        service.tell_stopping()
