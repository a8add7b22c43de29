"""Free ports: no two processes find the same one while neither listens on it yet."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tests
from headwater.engines.engine import EngineUnavailable
from headwater.ops.start import sockets

ROOT = Path(tests.__path__[0]).parent
HOST = "127.0.0.1"

FIND = """
import sys
from headwater.ops.start import sockets
sockets.FREE_FROM, sockets.FREE_TO = int(sys.argv[1]), int(sys.argv[2])
print(sockets.free_range(1, "127.0.0.1"), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """A range of six ports, all free, of which free_range draws the first five."""
    first = sockets.free_range(6, HOST)
    _forget()
    monkeypatch.setattr(sockets, "FREE_FROM", first)
    monkeypatch.setattr(sockets, "FREE_TO", first + 6)
    yield first, first + 6
    _forget()


def _forget() -> None:
    while sockets._reservations:
        sockets._reservations.pop()[1].close()


@pytest.mark.skipif(sys.platform != "linux", reason="ports are reserved on Linux only")
def test_no_two_processes_find_the_same_port(few: tuple[int, int]) -> None:
    """A process that has found a port and does not listen yet keeps it; at its end the port is free again."""
    arguments = [sys.executable, "-c", FIND, *map(str, few)]
    with subprocess.Popen(arguments, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        theirs = int(other.stdout.readline())
        mine = {sockets.free_range(1, HOST) for _ in range(4)}
        assert mine == {*range(few[0], few[1] - 1)} - {theirs}
        with pytest.raises(EngineUnavailable, match="consecutive free ports"):
            sockets.free_range(1, HOST)
        other.communicate()
    assert sockets.free_range(1, HOST) == theirs


@pytest.mark.skipif(sys.platform != "linux", reason="ports are reserved on Linux only")
def test_a_port_can_be_found_again_after_a_while(
    few: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that lives long does not use up the range."""
    for _ in range(few[1] - few[0] - 1):
        sockets.free_range(1, HOST)
    monkeypatch.setattr(sockets, "RESERVED_S", -1.0)
    for _ in range(20):
        sockets.free_range(1, HOST)
    assert len(sockets._reservations) == 1
