"""Adapters as files: what is taken into the cache, and what is refused on the way."""

import asyncio
import fcntl
import io
import os
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from headwater.engines.adapter_files import AdapterError, AdapterFiles, AdapterFolder, SourceMissing
from headwater.engines.adapter_files.origins import FolderOrigin
from headwater.engines.adapter_files.peft import CONFIG, WEIGHTS, same_base
from tests.support.adapters import files, make_adapter, safetensors

PICKLE = b"\x80\x04\x95never to be loaded"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder that is allowed, with nothing in it."""
    folder = tmp_path / "allowed"
    folder.mkdir()
    return folder


@pytest.fixture
def cache(tmp_path: Path, source: Path) -> AdapterFiles:
    """An empty cache that may fetch from it."""
    return files(tmp_path / "cache", source)


def kept(cache_of: Path) -> list[str]:
    """Names in the cache, leftovers included."""
    return sorted(path.name for path in (cache_of / "cache").iterdir())


def archive_of(path: Path, members: dict[str, bytes]) -> Path:
    """A .zip or .tar.gz with these members."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
            for name, data in members.items():
                packed.writestr(name, data)
    else:
        with tarfile.open(path, "w:gz") as tape:
            for name, data in members.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tape.addfile(info, io.BytesIO(data))
    return path


async def test_a_folder_is_kept_by_its_digest(cache: AdapterFiles, source: Path, tmp_path: Path) -> None:
    """Only the two files, under a name that the content gives; equal content is kept once."""
    one = make_adapter(source / "one", rank=8, base_model_name_or_path="org/sim")
    (one / "training_args.bin").write_bytes(PICKLE)
    found = await cache.fetch(str(one))
    assert found == AdapterFolder(tmp_path / "cache" / found.digest, found.digest, 8, "org/sim")
    assert sorted(os.listdir(found.folder)) == [CONFIG, WEIGHTS]
    assert (found.folder / WEIGHTS).read_bytes() == (one / WEIGHTS).read_bytes()
    again = make_adapter(source / "again", rank=8, base_model_name_or_path="org/sim")
    assert await cache.fetch(f"file://{again}") == found
    other = make_adapter(source / "other", seed=2, rank=8, base_model_name_or_path="org/sim")
    assert (await cache.fetch(str(other))).digest != found.digest
    assert len(kept(tmp_path)) == 2


async def test_what_is_known_by_its_digest_is_not_fetched_again(cache: AdapterFiles, source: Path) -> None:
    """The source may even be gone."""
    folder = make_adapter(source / "one")
    found = await cache.fetch(str(folder))
    for path in folder.iterdir():
        path.unlink()
    assert await cache.fetch(str(folder), found.digest) == found
    with pytest.raises(AdapterError, match=CONFIG) as caught:
        await cache.fetch(str(folder))
    assert caught.value.status == 404


async def test_other_weights_than_the_card_says_are_refused(
    cache: AdapterFiles, source: Path, tmp_path: Path
) -> None:
    """A source that changed must not make two workers serve different answers under one name."""
    make_adapter(source / "one", seed=2)
    with pytest.raises(AdapterError, match="other weights") as caught:
        await cache.fetch(str(source / "one"), "0" * 64)
    assert caught.value.status == 409
    assert kept(tmp_path) == []
    with pytest.raises(AdapterError, match="no digest"):
        await cache.fetch(str(source / "one"), "../" + "0" * 61)


@pytest.mark.parametrize("name", ["a.tar.gz", "a.zip"])
@pytest.mark.parametrize("inside", ["", "deep/er/"])
async def test_an_archive_gives_the_same_adapter(
    cache: AdapterFiles, source: Path, name: str, inside: str
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
        ({"../" + WEIGHTS: b"x"}, "leaves its folder"),
        ({"a/../../b.txt": b"x"}, "leaves its folder"),
        ({"/etc/" + CONFIG: b"{}"}, "leaves its folder"),
        ({"a/" + CONFIG: b"{}", "b/" + CONFIG: b"{}"}, "more than one adapter"),
        ({"a/" + CONFIG: b"{}", "b/" + WEIGHTS: b"{}"}, "more than one adapter"),
        ({CONFIG: b"{}", "adapter_model.bin": PICKLE}, "adapter_model.bin.*runs code"),
        ({CONFIG: b"{}"}, f"no {WEIGHTS}"),
        ({"README.md": b"x"}, f"no {WEIGHTS}"),
    ],
)
async def test_an_archive_that_is_none_of_an_adapter_is_refused(
    cache: AdapterFiles, source: Path, tmp_path: Path, name: str, members: dict[str, bytes], why: str
) -> None:
    """And nothing is left of it, neither in the cache nor beside it."""
    archive_of(source / name, members)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(AdapterError, match=why):
        await cache.fetch(str(source / name))
    assert [path for path in sorted(tmp_path.rglob("*")) if path.name != "cache"] == before


async def test_links_and_devices_in_an_archive_are_refused(cache: AdapterFiles, source: Path) -> None:
    """A link in the place of a file would have whatever it points to served."""
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE):
        with tarfile.open(source / "a.tar", "w") as tape:
            info = tarfile.TarInfo(WEIGHTS)
            info.type, info.linkname = kind, "/etc/hostname"
            tape.addfile(info)
        with pytest.raises(AdapterError, match="link or a device"):
            await cache.fetch(str(source / "a.tar"))
    with zipfile.ZipFile(source / "a.zip", "w") as packed:
        link = zipfile.ZipInfo(WEIGHTS)
        link.external_attr = 0o120777 << 16
        packed.writestr(link, "/etc/hostname")
    with pytest.raises(AdapterError, match="link or a device"):
        await cache.fetch(str(source / "a.zip"))
    (source / "b.zip").write_bytes(b"no archive")
    with pytest.raises(AdapterError, match="can not be unpacked"):
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
        with pytest.raises(AdapterError, match=r"more than 1 MiB.*--lora-max-mib"):
            await cache.fetch(str(path))
    assert kept(tmp_path) == []


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (b"not JSON", "not readable"),
        (b"[]", "not readable"),
        (b"{}", "no usable rank"),
        (b'{"r": 0}', "no usable rank"),
        (b'{"r": "8"}', "no usable rank"),
        (b'{"r": 8, "rank_pattern": {"q": -1}}', "no usable rank"),
        (b'{"r": 8, "peft_type": "IA3"}', "'IA3'"),
        (b'{"r": 2}', "says rank 2.*of rank 4"),
        (b" " * (2 << 20), "greater than 1 MiB"),
    ],
)
async def test_a_config_that_is_not_usable_is_refused(
    cache: AdapterFiles, source: Path, config: bytes, why: str
) -> None:
    """By what is wrong with it."""
    folder = make_adapter(source / "one", rank=4)
    (folder / CONFIG).write_bytes(config)
    with pytest.raises(AdapterError, match=why) as caught:
        await cache.fetch(str(folder))
    assert caught.value.status == 400


async def test_the_greatest_rank_counts(cache: AdapterFiles, source: Path) -> None:
    """A pattern may give some layers more."""
    folder = make_adapter(source / "one", rank=4, rank_pattern={"v_proj": 12, "q_proj": 2})
    assert (await cache.fetch(str(folder))).rank == 12


@pytest.mark.parametrize(
    "weights",
    [
        PICKLE,
        b"",
        (1 << 40).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (10).to_bytes(8, "little") + b'{"a": 123}',
        safetensors({})[:8],
    ],
    ids=["pickle", "empty", "header too long", "no matrices", "a list", "no tensor", "cut in the header"],
)
async def test_weights_that_are_no_safetensors_are_refused(
    cache: AdapterFiles, source: Path, weights: bytes
) -> None:
    """Whatever the file is called."""
    folder = make_adapter(source / "one")
    (folder / WEIGHTS).write_bytes(weights)
    with pytest.raises(AdapterError, match=WEIGHTS):
        await cache.fetch(str(folder))


async def test_weights_that_are_cut_short_are_refused(cache: AdapterFiles, source: Path) -> None:
    """An interrupted upload must not become an adapter."""
    folder = make_adapter(source / "one")
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[:-1])
    with pytest.raises(AdapterError, match="cut short"):
        await cache.fetch(str(folder))


async def test_pickled_weights_are_refused_by_name(cache: AdapterFiles, source: Path) -> None:
    """With what to do about it."""
    folder = make_adapter(source / "one")
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    with pytest.raises(AdapterError, match=r"adapter_model\.bin: that runs code.*Save them as"):
        await cache.fetch(str(folder))


async def test_links_may_not_lead_out_of_the_allowed_folders(
    cache: AdapterFiles, source: Path, tmp_path: Path
) -> None:
    """Neither the folder itself nor a file in it; within them they may."""
    secret = make_adapter(tmp_path / "secret")
    (source / "out").symlink_to(secret)
    with pytest.raises(AdapterError, match="--lora-sources") as caught:
        await cache.fetch(str(source / "out"))
    assert caught.value.status == 403
    half = make_adapter(source / "half")
    (half / WEIGHTS).unlink()
    (half / WEIGHTS).symlink_to(secret / WEIGHTS)
    with pytest.raises(AdapterError, match="--lora-sources"):
        await cache.fetch(str(half))
    whole = make_adapter(source / "whole")
    (source / "link").symlink_to(whole)
    assert (await cache.fetch(str(source / "link"))).folder.is_dir()


async def test_a_pipe_does_not_hold_a_worker_up(cache: AdapterFiles, source: Path) -> None:
    """Opened like a file it would wait for a writer for ever."""
    folder = make_adapter(source / "one")
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)
    async with asyncio.timeout(5):
        with pytest.raises(AdapterError, match="no plain file"):
            await cache.fetch(str(folder))


class Slow:
    """Counts copies of files, and lets them go on when told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.copies = 0
        self.go = asyncio.Event()
        plain = FolderOrigin.save

        async def save(origin: FolderOrigin, *arguments: Any) -> None:
            self.copies += 1
            await self.go.wait()
            await plain(origin, *arguments)

        monkeypatch.setattr(FolderOrigin, "save", save)


async def test_those_who_want_the_same_wait_for_one_download(
    cache: AdapterFiles, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on when one of them gives up; and when it fails all are told and the next tries again."""
    slow = Slow(monkeypatch)
    folder = make_adapter(source / "one")
    waiting = [asyncio.ensure_future(cache.fetch(str(folder))) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    slow.go.set()
    first, *rest = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(first, asyncio.CancelledError)
    assert isinstance(rest[0], AdapterFolder)
    assert rest[0] == rest[1]
    assert slow.copies == 2, "one for each file"
    nothing = [asyncio.ensure_future(cache.fetch(str(source / "two"))) for _ in range(2)]
    assert [type(one) for one in await asyncio.gather(*nothing, return_exceptions=True)] == [
        SourceMissing
    ] * 2
    make_adapter(source / "two")
    assert (await cache.fetch(str(source / "two"))).rank == 4


async def test_a_source_that_is_too_slow_is_given_up(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the setting that says how long; nothing is left of it."""
    Slow(monkeypatch)
    cache = files(tmp_path / "cache", source, fetch_s=0.05)
    with pytest.raises(AdapterError, match=r"within 0\.05 s \(--lora-fetch-s\)"):
        await cache.fetch(str(make_adapter(source / "one")))
    assert kept(tmp_path) == []


async def test_the_cache_drops_what_was_used_longest_ago_but_nothing_in_use(
    tmp_path: Path, source: Path
) -> None:
    """In use here, or by another process: that is what the lock on the folder tells."""
    cache = files(tmp_path / "cache", source, cache_bytes_max=0)

    async def fetch(seed: int) -> AdapterFolder:
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


def test_a_base_model_is_known_by_the_last_part_of_its_name() -> None:
    """Its author's hub and our folder differ in what comes before."""
    names = ("smollm2-135m-instruct", "chat")
    assert same_base("HuggingFaceTB/SmolLM2-135M-Instruct", names)
    assert same_base("/models/smollm2-135m-instruct/", names)
    assert same_base("", names), "it names none"
    assert not same_base("HuggingFaceTB/SmolLM2-360M-Instruct", names)
