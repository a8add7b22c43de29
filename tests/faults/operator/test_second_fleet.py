"""A second fleet where one runs already: it says so, and leaves the first one alone."""

import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes.commands import ended, launched
from tests.support.processes.fleet import fleet

pytestmark = [pytest.mark.processes]

BODY: dict[str, Any] = {"model": "sim", "prompt": "Where does a river begin?", "max_tokens": 4}


async def test_the_same_server_and_namespace(tmp_path: Path) -> None:
    """One line that says which name is taken and who holds it; in a namespace of its own it serves.

    What one that was killed held there lapses within seconds: a new one needs no other name.
    """
    async with fleet(tmp_path, "--engine", "sim", "--workers", "1") as first, first.client() as client:
        second = ("--engine", "sim", "--workers", "1", "--port", "0", "--nats", first.nats)
        data = str(tmp_path / "second")
        line = (await ended("up", *second, "--data-dir", data, within_s=20)).told()
        assert "worker-0" in line or "router-0" in line or "edge-0" in line
        assert socket.gethostname() in line
        assert any(str(pid) in line for pid in first.pids("headwater"))
        assert "--namespace" in line
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200
        (tmp_path / "other").mkdir()
        flags = (*second, "--namespace", "second", "--data-dir", str(tmp_path / "other"))
        async with launched(tmp_path / "other", *flags) as other, other.client() as own:
            assert (await own.post("/v1/completions", json=BODY)).status_code == 200
            os.kill(other.process.pid, signal.SIGKILL)
            await other.process.wait()
        async with launched(tmp_path / "other", *flags) as again, again.client() as own:
            assert (await own.post("/v1/completions", json=BODY)).status_code == 200
