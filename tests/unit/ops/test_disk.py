"""Room on disks."""

from pathlib import Path

import pytest

from headwater.ops.diagnosis import ROOM_BYTES, check_room, free_bytes


def test_a_folder_that_is_still_to_be_made_is_on_its_parents_disk(tmp_path: Path) -> None:
    """So a start can be checked before it makes one."""
    free = free_bytes(tmp_path / "a" / "b")
    assert free is not None
    assert free > 0


def test_a_folder_in_one_that_was_deleted_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is on no disk."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert free_bytes(Path("data")) is None
    monkeypatch.chdir(tmp_path)


def test_a_disk_that_is_nearly_full_is_found() -> None:
    """One whose room is unknown is not."""
    found = check_room([("a", ROOM_BYTES), ("b", ROOM_BYTES - 1), ("c", None)])
    assert [(one.id, one.about) for one in found] == [("disk-full", "b")]
    assert "511 MiB" in found[0].text
