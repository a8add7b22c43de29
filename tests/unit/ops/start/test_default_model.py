"""The small default model is converted once, however many processes ask for it."""

import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from headwater.engines.engine import EngineUnavailable
from headwater.ops.start import model


class Conversions:
    """In the place of the process that converts: writes the model once `may_end` is set, or fails."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.may_end = Event()
        self.begun = 0
        self.fails = False

    def run(self, command: list[str], *, check: bool) -> subprocess.CompletedProcess[str]:
        """As `subprocess.run`."""
        assert not check
        self.begun += 1
        self.may_end.wait()
        if self.fails:
            return subprocess.CompletedProcess(command, 1)
        self.folder.mkdir()
        (self.folder / "model.safetensors").touch()
        return subprocess.CompletedProcess(command, 0)


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Conversions:
    """In an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = Conversions(model.path())
    monkeypatch.setattr(subprocess, "run", made.run)
    return made


def waits_for(lock: Path) -> bool:
    """Does anything wait for the lock of that file? As Linux lists them."""
    inode = f":{lock.stat().st_ino} " if lock.exists() else "none"
    return any("->" in line and inode in line for line in Path("/proc/locks").read_text().splitlines())


def test_one_converts_and_the_others_wait(conversions: Conversions) -> None:
    lock = conversions.folder.parent / f".{model.NAME}.lock"
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(model.ensure) for _ in range(2)]
        while not waits_for(lock) and conversions.begun < 2:
            time.sleep(0.001)
        conversions.may_end.set()
        assert {one.result() for one in asked} == {conversions.folder}
    assert conversions.begun == 1


def test_the_next_one_tries_again_after_a_failure(conversions: Conversions) -> None:
    conversions.may_end.set()
    conversions.fails = True
    with pytest.raises(EngineUnavailable, match="give --model a folder"):
        model.ensure()
    conversions.fails = False
    assert model.ensure() == conversions.folder
    assert conversions.begun == 2
