"""The cache of adapters: one download for many, a time for each, and room for what is in use."""

import asyncio
import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headwater.engines.lora_cache import LoraCache, LoraError, LoraFolder, SourceMissing
from headwater.engines.lora_sources import CONFIG, FolderOrigin
from tests.support.data.lora_archives import kept
from tests.support.engines.adapters import files, make_adapter


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder that is allowed, with nothing in it."""
    folder = tmp_path / "allowed"
    folder.mkdir()
    return folder


@pytest.fixture
def cache(tmp_path: Path, source: Path) -> LoraCache:
    """An empty cache that may fetch from it."""
    return files(tmp_path / "cache", source)


async def test_what_is_known_by_its_digest_is_not_fetched_again(cache: LoraCache, source: Path) -> None:
    """The source may even be gone."""
    folder = make_adapter(source / "one")
    found = await cache.fetch(str(folder))
    for path in folder.iterdir():
        path.unlink()
    assert await cache.fetch(str(folder), found.digest) == found
    with pytest.raises(LoraError, match=CONFIG) as caught:
        await cache.fetch(str(folder))
    assert caught.value.status == 404


async def test_other_weights_than_the_card_says_are_refused(
    cache: LoraCache, source: Path, tmp_path: Path
) -> None:
    """A source that changed must not make two workers serve different answers under one name."""
    make_adapter(source / "one", seed=2)
    with pytest.raises(LoraError, match="other weights") as caught:
        await cache.fetch(str(source / "one"), "0" * 64)
    assert caught.value.status == 409
    assert kept(tmp_path) == []
    with pytest.raises(LoraError, match="not a digest"):
        await cache.fetch(str(source / "one"), "../" + "0" * 61)


class Slow:
    """Counts copies of files, and lets them go on when told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.copies = 0
        self.go = threading.Event()
        plain = FolderOrigin.save

        def save(origin: FolderOrigin, *arguments: Any) -> None:
            self.copies += 1
            self.go.wait()
            plain(origin, *arguments)

        monkeypatch.setattr(FolderOrigin, "save", save)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    """Folders that are slow. What still waits goes on when the test ends."""
    made = Slow(monkeypatch)
    yield made
    made.go.set()


async def test_those_who_want_the_same_wait_for_one_download(
    cache: LoraCache, source: Path, slow: Slow
) -> None:
    """It goes on when one of them gives up; and when it fails all are told and the next tries again."""
    folder = make_adapter(source / "one")
    waiting = [asyncio.ensure_future(cache.fetch(str(folder))) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    slow.go.set()
    first, *rest = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(first, asyncio.CancelledError)
    assert isinstance(rest[0], LoraFolder)
    assert rest[0] == rest[1]
    assert slow.copies == 2, "one for each file"
    nothing = [asyncio.ensure_future(cache.fetch(str(source / "two"))) for _ in range(2)]
    assert [type(one) for one in await asyncio.gather(*nothing, return_exceptions=True)] == [
        SourceMissing
    ] * 2
    make_adapter(source / "two")
    assert (await cache.fetch(str(source / "two"))).rank == 4


@pytest.mark.usefixtures("slow")
async def test_a_source_that_is_too_slow_is_given_up(tmp_path: Path, source: Path) -> None:
    """With the setting that says how long; nothing is left of it."""
    cache = files(tmp_path / "cache", source, fetch_s=0.05)
    with pytest.raises(LoraError, match=r"within 0\.05 s"):
        await cache.fetch(str(make_adapter(source / "one")))
    assert kept(tmp_path) == []


async def test_the_cache_drops_what_was_used_longest_ago_but_nothing_in_use(
    tmp_path: Path, source: Path
) -> None:
    """In use here, or by another process: that is what the lock on the folder tells."""
    cache = files(tmp_path / "cache", source, cache_bytes_max=0)

    async def fetch(seed: int) -> LoraFolder:
        return await cache.fetch(str(make_adapter(source / str(seed), seed)))

    first, second = await fetch(1), await fetch(2)
    assert kept(tmp_path) == sorted([first.digest, second.digest]), "both are in use"
    handle = os.open(second.folder, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_SH)
    cache.drop(first.digest)
    cache.drop(second.digest)
    third = await fetch(3)
    assert kept(tmp_path) == sorted([second.digest, third.digest])
    os.close(handle)
    fourth = await fetch(4)
    assert kept(tmp_path) == sorted([third.digest, fourth.digest])
    cache.close()


async def test_what_is_used_twice_is_dropped_twice(tmp_path: Path, source: Path) -> None:
    """Two adapters with the same weights share their folder."""
    cache = files(tmp_path / "cache", source, cache_bytes_max=0)
    one = make_adapter(source / "one")
    found = await cache.fetch(str(one))
    assert await cache.fetch(str(one)) == found
    cache.drop(found.digest)
    await cache.fetch(str(make_adapter(source / "two", 2)))
    assert found.folder.is_dir()
    cache.drop(found.digest)
    await cache.fetch(str(make_adapter(source / "three", 3)))
    assert not found.folder.exists()
