"""The data directory: one holder at a time, a format that this release knows, and one line for everything else."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.ops.config.setting import ConfigError
from headwater.ops.start.children import child_environment
from headwater.ops.start.data_folder import FORMAT, held

HOLD = """
import sys
from pathlib import Path
from headwater.ops.start.data_folder import held
with held(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def another_process_holds(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process uses the directory until it is told to end, or killed."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=child_environment(),
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            assert process.stdout.readline() == b"held\n"
            yield process
        finally:
            process.stdin.close()
            process.wait(20)


def refusal(folder: Path) -> str:
    """Why the directory cannot be used: one line that names it and the flag."""
    with pytest.raises(ConfigError) as caught, held(folder):
        pass
    text = str(caught.value)
    assert "\n" not in text
    assert str(folder) in text
    return text


def test_a_missing_directory_is_made_with_its_format(tmp_path: Path) -> None:
    """All folders above it too; what holds it is written where people look."""
    folder = tmp_path / "a" / "b"
    with held(folder):
        assert (folder / "format").read_text() == f"{FORMAT}\n"
        assert f"pid {os.getpid()} " in (folder / "lock").read_text()


def test_what_lies_in_it_stays(tmp_path: Path) -> None:
    """A directory of a release that wrote no format is taken over, and used again and again."""
    (tmp_path / "nats").mkdir()
    (tmp_path / "nats" / "file").write_text("kept")
    for _ in range(3):
        with held(tmp_path):
            pass
    assert (tmp_path / "nats" / "file").read_text() == "kept"
    assert (tmp_path / "format").read_text() == f"{FORMAT}\n"


def test_a_second_fleet_is_refused_and_told_who_has_it(tmp_path: Path) -> None:
    """In the same process, in another one, and whatever name leads there; the holder is not disturbed."""
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "data")
    with held(tmp_path / "data"):
        text = refusal(tmp_path / "data")
        assert f"`headwater up` with pid {os.getpid()} since" in text
        assert "--data-dir" in text
        assert f"pid {os.getpid()} " in refusal(tmp_path / "link")
    with another_process_holds(tmp_path / "data") as process:
        for _ in range(2):
            assert f"with pid {process.pid} since" in refusal(tmp_path / "data")
    with held(tmp_path / "data"):
        pass


def test_a_killed_holder_leaves_it_free(tmp_path: Path) -> None:
    """At once, and whatever its lock file still says."""
    with another_process_holds(tmp_path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait(20)
        assert f"pid {process.pid} " in (tmp_path / "lock").read_text()
        with held(tmp_path):
            assert (tmp_path / "lock").read_text().count("\n") == 1
            assert f"pid {os.getpid()} " in (tmp_path / "lock").read_text()


def test_it_is_free_after_an_error_in_the_block(tmp_path: Path) -> None:
    """A fleet that failed to start can be started again."""

    def fail() -> None:
        with held(tmp_path):
            raise RuntimeError("no start")

    with pytest.raises(RuntimeError, match="no start"):
        fail()
    with held(tmp_path):
        pass


def test_it_is_not_inherited(tmp_path: Path) -> None:
    """Children that outlive their `up` do not keep the next one out."""
    child: subprocess.Popen[bytes] | None = None
    try:
        with held(tmp_path):
            child = subprocess.Popen(["sleep", "60"], close_fds=False)
        with held(tmp_path):
            pass
    finally:
        if child is not None:
            child.kill()
            child.wait(20)


def test_a_store_of_a_newer_release_is_refused_and_left_alone(tmp_path: Path) -> None:
    """It says both formats, and the directory is free again."""
    (tmp_path / "format").write_text(f"{FORMAT + 6}\n")
    text = refusal(tmp_path)
    assert f"format {FORMAT + 6}" in text
    assert f"knows format {FORMAT}" in text
    assert (tmp_path / "format").read_text() == f"{FORMAT + 6}\n"
    (tmp_path / "format").write_text(f"{FORMAT}\n")
    with held(tmp_path):
        pass


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"PNG", "'PNG'"),
        (b"1.2", "'1.2'"),
        (b"-1", "'-1'"),
        (b"x" * 5000, repr("x" * 40)),
        (b"\xff\xfe\x00garbage", "garbage"),
        # A character that only looks like a digit.
        ("²".encode(), "format"),
        (b"9" * 5000, repr("9" * 40)),
    ],
)
def test_a_format_file_of_somebody_else_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    """With the beginning of what it says, in one line."""
    (tmp_path / "format").write_bytes(content)
    assert words in refusal(tmp_path)
    assert (tmp_path / "format").read_bytes() == content


@pytest.mark.parametrize("name", ["file", "file/data", "lock-is-folder", "format-is-folder"])
def test_what_cannot_be_a_data_directory_is_one_line(tmp_path: Path, name: str) -> None:
    """The operating system's words, and the flag to change."""
    (tmp_path / "file").write_text("")
    (tmp_path / "lock-is-folder" / "lock").mkdir(parents=True)
    (tmp_path / "format-is-folder" / "format").mkdir(parents=True)
    folder = tmp_path / name
    text = refusal(folder)
    assert text.startswith(f"--data-dir {folder} cannot be used: ")
    assert text.endswith("choose another one")


def test_a_read_only_directory_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for root, whom permissions do not stop: the error is what the system call gives."""
    real = os.open

    def refuse(path: object, flags: int, mode: int = 0o777) -> int:
        if str(path).endswith("lock"):
            raise PermissionError(13, "Permission denied")
        return real(str(path), flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    assert "permission denied" in refusal(tmp_path)


def test_a_full_disk_is_one_line_and_frees_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be written is no holder."""

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        assert "no space left on device" in refusal(tmp_path)
    with held(tmp_path):
        pass
