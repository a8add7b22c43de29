"""Log lines of processes that share one stream: each is written whole."""

import json
import socket
import subprocess
import sys

import pytest

from headwater.ops.start.children import child_environment

SPEAK = """
import logging, structlog
from headwater.ops.process.logging import configure
configure("info", "json", worker="w1")
log = structlog.get_logger("test")
log.info("first", number=1)
log.warning("second", text="two\\nlines")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("third")
logging.getLogger("library").warning("fourth %s", "one")
"""


def written(**environ: str) -> list[bytes]:
    """What a process wrote to standard error, one entry for each call: the socket keeps them apart."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.settimeout(20)
        subprocess.run(
            [sys.executable, "-c", SPEAK],
            stderr=theirs.fileno(),
            env=child_environment() | environ,
            timeout=60,
            check=True,
        )
        theirs.close()
        parts = []
        while part := ours.recv(1 << 16):
            parts.append(part)
        return parts


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_each_line_is_one_write(unbuffered: str) -> None:
    """Or the lines of two processes mix. Container images set PYTHONUNBUFFERED, and then each write counts."""
    parts = written(PYTHONUNBUFFERED=unbuffered)
    assert [part.count(b"\n") for part in parts] == [1] * len(parts)
    assert all(part.endswith(b"\n") for part in parts)
    events = [json.loads(part) for part in parts]
    assert [one["event"] for one in events] == ["first", "second", "third", "fourth one"]
    assert all(one["worker"] == "w1" for one in events)
    assert events[1]["text"] == "two\nlines"
    assert events[2]["exception"][0]["exc_type"] == "ZeroDivisionError"
