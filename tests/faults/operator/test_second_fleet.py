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
    """One line that says which name is taken and who holds it; in a namespace of its own it serves."""
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


async def test_one_that_was_killed_is_waited_for(tmp_path: Path) -> None:
    """What it held lapses within seconds; a new one needs no other name."""
    (tmp_path / "server").mkdir()
    async with fleet(
        tmp_path / "server", "--engine", "sim", "--workers", "1", "--namespace", "other"
    ) as server:
        flags: tuple[str, ...] = ("--engine", "sim", "--workers", "1", "--nats", server.nats)
        folder = tmp_path / "own"
        folder.mkdir()
        flags = (*flags, "--port", "0", "--data-dir", str(folder))
        async with launched(folder, *flags) as first:
            os.kill(first.process.pid, signal.SIGKILL)
            await first.process.wait()
        async with launched(folder, *flags) as again, again.client() as client:
            assert (await client.post("/v1/completions", json=BODY)).status_code == 200
