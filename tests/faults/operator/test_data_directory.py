"""Who may use a data directory, and what `headwater up` says when it cannot use it."""

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.clients.traffic import answer
from tests.support.processes.commands import Ended, ended, launched
from tests.support.processes.fleet import fleet, stream_text
from tests.support.servers.disk import disk

pytestmark = [pytest.mark.processes]

FREE = ("--port", "0", "--nats-port", "0")
LONG: dict[str, Any] = {
    "model": "sim",
    "messages": [{"role": "user", "content": "Tell me a long story about a river."}],
    "max_tokens": 300,
    "ignore_eos": True,
    "seed": 3,
}


async def _up(data: Path, *flags: str, within_s: float = 20) -> Ended:
    """`headwater up` that is expected to refuse."""
    return await ended("up", "--engine", "sim", "--data-dir", str(data), *flags, within_s=within_s)


async def test_a_second_fleet_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    """The second `up` names the process that holds the directory and ends; the first loses neither file nor stream.

    The first has written its format: the number that a later version will read.
    """
    async with fleet(tmp_path, "--engine", "sim") as up, up.client() as client:
        assert (tmp_path / "data" / "format").read_text().strip() == "1"
        expected = await answer(client, LONG)
        config = tmp_path / "data" / "nats" / "nats.conf"
        before = config.read_bytes()
        server = up.pids("nats-server")
        running = asyncio.create_task(answer(client, LONG))
        second = await _up(tmp_path / "data", *FREE)
        line = second.told()
        assert str(up.process.pid) in line
        assert str(tmp_path / "data") in line
        assert config.read_bytes() == before
        assert up.pids("nats-server") == server
        assert await running == expected
        assert (await answer(client, {**LONG, "max_tokens": 8}))[1:] == ("length", 8)


async def test_a_killed_fleet_does_not_keep_its_directory(tmp_path: Path) -> None:
    """After SIGKILL of `up` the next one starts at once on the same data."""
    flags = ("--engine", "sim", "--data-dir", str(tmp_path / "data"), *FREE)
    async with launched(tmp_path, *flags) as up:
        os.kill(up.process.pid, signal.SIGKILL)
        await up.process.wait()
    async with launched(tmp_path, *flags) as up, up.client() as client:
        text, finish, _ = await stream_text(client, {**LONG, "max_tokens": 8})
        assert text
        assert finish == "length"


async def test_a_read_only_directory(tmp_path: Path) -> None:
    """One line that names the directory."""
    with disk(tmp_path / "data") as data:
        data.read_only()
        line = (await _up(tmp_path / "data", *FREE)).told()
    assert str(tmp_path / "data") in line
    assert "read-only" in line.lower()


async def test_a_directory_on_a_disk_that_is_nearly_full(tmp_path: Path) -> None:
    """It starts, and its log says what `headwater doctor` would."""
    with disk(tmp_path / "data") as data:
        data.leave(200 << 20)
        async with launched(tmp_path, "--engine", "sim", "--data-dir", str(tmp_path / "data"), *FREE) as up:
            said = [line for line in up.log.read_text().splitlines() if "fault_found" in line]
            assert len(said) == 1
            assert "disk-full" in said[0]
            assert str(tmp_path / "data") in said[0]


@pytest.mark.parametrize("below", ["", "deeper", "deeper/still"])
async def test_a_file_in_place_of_the_directory(tmp_path: Path, below: str) -> None:
    """The directory, or one of its parents, is a file."""
    (tmp_path / "taken").write_text("mine")
    data = tmp_path / "taken" / below if below else tmp_path / "taken"
    line = (await _up(data, *FREE)).told()
    assert str(data) in line
    assert (tmp_path / "taken").read_text() == "mine"


async def test_a_directory_that_cannot_be_made() -> None:
    """Its parent does not exist and cannot be created."""
    data = Path("/proc/headwater-no-such/data")
    assert str(data) in (await _up(data, *FREE)).told()


@contextmanager
def _taken_port() -> Iterator[int]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield int(other.getsockname()[1])


@pytest.mark.parametrize("flag", ["--port", "--nats-port"])
async def test_a_port_in_use(tmp_path: Path, flag: str) -> None:
    """A port that was asked for and is taken is an error that names flag and port; nothing else is used in silence."""
    with _taken_port() as port:
        flags = dict(zip(FREE[::2], FREE[1::2], strict=True)) | {flag: str(port)}
        line = (await _up(tmp_path / "data", *(word for pair in flags.items() for word in pair))).told()
    assert flag in line
    assert str(port) in line


@pytest.mark.parametrize(("text", "words"), [("999", ("999", "newer")), ("what?", ("format",))])
async def test_the_store_of_another_version(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    """It is left as it is; the line says both versions of the format, or that one is no number."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "format").write_text(f"{text}\n")
    line = (await _up(data, *FREE)).told()
    assert all(word in line for word in words)
    assert (data / "format").read_text() == f"{text}\n"
    assert not (data / "nats").exists()
