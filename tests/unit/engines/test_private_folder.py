"""Private folders: gone at the end, and those of a killed process with the next one that takes such a one."""

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from headwater.engines import process as engine_process


def hold(wire: Connection, parent: Path, kind: str) -> None:
    """Take a folder and wait."""
    wire.send(engine_process.take(kind, parent))
    signal.pause()


def held_by_another(parent: Path, kind: str) -> tuple[int, Path]:
    """The process that holds a folder, and the folder."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=hold, args=(theirs, parent, kind), daemon=True
    )
    process.start()
    assert process.pid is not None
    return process.pid, ours.recv()


def kill(pid: int) -> None:
    """And wait until it is dead."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_folder_is_private_and_goes_with_its_owner(tmp_path: Path) -> None:
    """With what is in it; again is fine."""
    folder = engine_process.take("engine", tmp_path)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert engine_process.is_private(folder)
    (folder / "socket").write_text("x")
    engine_process.give_up(folder)
    engine_process.give_up(folder)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_the_next_process_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    """Of the same kind only, and no folder of a process that lives."""
    dead, left = held_by_another(tmp_path, "engine")
    alive, kept = held_by_another(tmp_path, "engine")
    other, of_another_kind = held_by_another(tmp_path, "embeddings")
    try:
        kill(dead)
        kill(other)
        (tmp_path / "headwater-engine-without-lock").mkdir()
        mine = engine_process.take("engine", tmp_path)
        assert not left.exists()
        assert kept.exists()
        assert of_another_kind.exists()
        assert (tmp_path / "headwater-engine-without-lock").exists()
        engine_process.give_up(mine)
    finally:
        kill(alive)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_gives_up_its_own_only(tmp_path: Path) -> None:
    """What it inherited is its parent's."""
    inherited = engine_process.take("engine", tmp_path)
    pid = os.fork()
    if not pid:
        own = engine_process.take("engine", tmp_path)
        engine_process.give_up_own()
        os._exit(0 if inherited.exists() and not own.exists() else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert inherited.exists()
    engine_process.give_up_own()
    assert not inherited.exists()
