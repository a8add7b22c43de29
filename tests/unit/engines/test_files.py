"""Adapters as files: folders and archives that are taken into the cache, and what is refused on the way."""

import asyncio
import os
import tarfile
import zipfile
from pathlib import Path

import pytest

from headwater.engines.lora_cache import LoraCache, LoraError, LoraFolder
from headwater.engines.lora_sources import CONFIG, WEIGHTS
from tests.support.data.lora_archives import PICKLE, archive_of, kept
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


async def test_a_folder_is_kept_by_its_digest(cache: LoraCache, source: Path, tmp_path: Path) -> None:
    """Only the two files, under a name that the content gives; equal content is kept once."""
    one = make_adapter(source / "one", rank=8, base_model_name_or_path="org/sim")
    (one / "training_args.bin").write_bytes(PICKLE)
    found = await cache.fetch(str(one))
    assert found == LoraFolder(tmp_path / "cache" / found.digest, found.digest, 8, "org/sim")
    assert sorted(os.listdir(found.folder)) == [CONFIG, WEIGHTS]
    assert (found.folder / WEIGHTS).read_bytes() == (one / WEIGHTS).read_bytes()
    again = make_adapter(source / "again", rank=8, base_model_name_or_path="org/sim")
    assert await cache.fetch(f"file://{again}") == found
    other = make_adapter(source / "other", seed=2, rank=8, base_model_name_or_path="org/sim")
    assert (await cache.fetch(str(other))).digest != found.digest
    assert len(kept(tmp_path)) == 2


@pytest.mark.parametrize("name", ["a.tar.gz", "a.zip"])
@pytest.mark.parametrize("inside", ["", "deep/er/"])
async def test_an_archive_gives_the_same_adapter(
    cache: LoraCache, source: Path, name: str, inside: str
) -> None:
    """From wherever in it the files lie; what else is in it stays there."""
    folder = make_adapter(source / "plain")
    members = {inside + one: (folder / one).read_bytes() for one in (CONFIG, WEIGHTS)}
    archive_of(source / name, {"README.md": b"hello", inside + "optimizer.pt": PICKLE, **members})
    found = await cache.fetch(str(source / name))
    assert found == await cache.fetch(str(folder))
    assert sorted(os.listdir(found.folder)) == [CONFIG, WEIGHTS]


@pytest.mark.parametrize("name", ["a.tar.gz", "a.zip"])
@pytest.mark.parametrize(
    ("members", "why"),
    [
        ({"../" + WEIGHTS: b"x"}, "outside its folder"),
        ({"a/../../b.txt": b"x"}, "outside its folder"),
        ({"/etc/" + CONFIG: b"{}"}, "outside its folder"),
        ({"a/" + CONFIG: b"{}", "b/" + CONFIG: b"{}"}, "more than one adapter"),
        ({"a/" + CONFIG: b"{}", "b/" + WEIGHTS: b"{}"}, "more than one adapter"),
        ({CONFIG: b"{}", "adapter_model.bin": PICKLE}, "adapter_model.bin.*may run code"),
        ({CONFIG: b"{}"}, f"no {WEIGHTS}"),
        ({"README.md": b"x"}, f"no {WEIGHTS}"),
    ],
)
async def test_an_archive_that_is_none_of_an_adapter_is_refused(
    cache: LoraCache, source: Path, tmp_path: Path, name: str, members: dict[str, bytes], why: str
) -> None:
    """And nothing is left of it, neither in the cache nor beside it."""
    archive_of(source / name, members)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(LoraError, match=why):
        await cache.fetch(str(source / name))
    assert [path for path in sorted(tmp_path.rglob("*")) if path.name != "cache"] == before


async def test_links_and_devices_in_an_archive_are_refused(cache: LoraCache, source: Path) -> None:
    """A link in the place of a file would have whatever it points to served."""
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE):
        with tarfile.open(source / "a.tar", "w") as tape:
            info = tarfile.TarInfo(WEIGHTS)
            info.type, info.linkname = kind, "/etc/hostname"
            tape.addfile(info)
        with pytest.raises(LoraError, match="link or a device"):
            await cache.fetch(str(source / "a.tar"))
    with zipfile.ZipFile(source / "a.zip", "w") as packed:
        link = zipfile.ZipInfo(WEIGHTS)
        link.external_attr = 0o120777 << 16
        packed.writestr(link, "/etc/hostname")
    with pytest.raises(LoraError, match="link or a device"):
        await cache.fetch(str(source / "a.zip"))
    (source / "b.zip").write_bytes(b"no archive")
    with pytest.raises(LoraError, match="cannot be unpacked"):
        await cache.fetch(str(source / "b.zip"))


async def test_more_than_an_adapter_may_have_is_refused(tmp_path: Path, source: Path) -> None:
    """Of a folder, of an archive, of what an archive unpacks to, and of what is passed over in it."""
    cache = files(tmp_path / "cache", source, bytes_max=1 << 20)
    big = bytes(2 << 20)
    folder = make_adapter(source / "big")
    (folder / WEIGHTS).write_bytes(big)
    bomb = archive_of(source / "bomb.tar.gz", {WEIGHTS: big})
    zip_bomb = archive_of(source / "bomb.zip", {WEIGHTS: big})
    beside = archive_of(source / "beside.tar.gz", {"other": big})
    assert bomb.stat().st_size < 1 << 16
    for path in (folder, bomb, zip_bomb, beside):
        with pytest.raises(LoraError, match=r"more than 1 MiB.*--lora-max-mib"):
            await cache.fetch(str(path))
    assert kept(tmp_path) == []


async def test_links_may_not_lead_out_of_the_allowed_folders(
    cache: LoraCache, source: Path, tmp_path: Path
) -> None:
    """Neither the folder itself nor a file in it; within them they may."""
    secret = make_adapter(tmp_path / "secret")
    (source / "out").symlink_to(secret)
    with pytest.raises(LoraError, match="--lora-sources") as caught:
        await cache.fetch(str(source / "out"))
    assert caught.value.status == 403
    half = make_adapter(source / "half")
    (half / WEIGHTS).unlink()
    (half / WEIGHTS).symlink_to(secret / WEIGHTS)
    with pytest.raises(LoraError, match="--lora-sources"):
        await cache.fetch(str(half))
    whole = make_adapter(source / "whole")
    (source / "link").symlink_to(whole)
    assert (await cache.fetch(str(source / "link"))).folder.is_dir()


async def test_a_pipe_does_not_hold_a_worker_up(cache: LoraCache, source: Path) -> None:
    """Opened like a file it would wait for a writer for ever."""
    folder = make_adapter(source / "one")
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)
    async with asyncio.timeout(30):
        with pytest.raises(LoraError, match="not a regular file"):
            await cache.fetch(str(folder))
