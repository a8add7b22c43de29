"""The local cache of LoRA files: one folder per digest, created atomically, shared by all workers of the machine.

An adapter is two files in PEFT's layout, `adapter_config.json` and `adapter_model.safetensors`. No other file of the source
is kept, so nothing that runs code when it is loaded (.bin, .pt, .pkl) reaches an engine.
"""

import asyncio
import fcntl
import os
import re
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Generator
from contextlib import closing
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

import structlog

from headwater.engines import lora_sources
from headwater.engines.lora_sources import (
    FILES,
    Budget,
    LoraError,
    LoraPolicy,
    Source,
    SourceMissing,
    chunks,
    origin,
)
from headwater.engines.public_address import in_own_thread

__all__ = ["LoraCache", "LoraError", "LoraFolder", "LoraPolicy", "Source", "SourceMissing"]


MEMBERS_MAX = 10_000


def unpack(archive: Path, into: Path, budget: Budget, source: str) -> list[str]:
    """Extract `FILES` from any folder of the archive; returns the names of all members.

    Raises `LoraError` for a name outside the archive's folder, for two adapters in one archive, for links instead of
    files, and beyond the budget, which also counts members before the files.
    """
    names: list[str] = []
    home: PurePosixPath | None = None
    try:
        with closing(_members(archive, budget)) as members:
            for name, stream in members:
                path = PurePosixPath(name)
                if path.is_absolute() or ".." in path.parts or "\\" in name or ":" in name:
                    raise LoraError(400, f"{source} contains {name!r}, which is outside its folder: rejected")
                names.append(path.name)
                if len(names) > MEMBERS_MAX:
                    raise LoraError(400, f"{source} contains more than {MEMBERS_MAX} files")
                if path.name not in FILES:
                    continue
                if stream is None:
                    raise LoraError(400, f"{source}: {name} is a link or a device, not a file")
                if home not in (None, path.parent) or (into / path.name).exists():
                    raise LoraError(400, f"{source} contains more than one adapter")
                home = path.parent
                budget.save(chunks(stream), into / path.name)
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError) as error:
        # zipfile raises RuntimeError for a required password or an unknown compression method.
        raise LoraError(400, f"{source} cannot be unpacked: {error}") from error
    return names


def _members(archive: Path, budget: Budget) -> Generator[tuple[str, IO[bytes] | None], None, None]:
    """Name and content of every member except folders; None for members that are not regular files."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as packed:
            for info in packed.infolist():
                link = info.external_attr >> 16 & 0o170000 not in (0, 0o100000)
                if info.is_dir():
                    continue
                if link:
                    yield info.filename, None
                    continue
                with packed.open(info) as stream:
                    yield info.filename, stream
        return
    with tarfile.open(archive, "r:*") as tape:
        for member in tape:
            if PurePosixPath(member.name).name not in FILES:
                # Skipped members are decompressed as well.
                budget.spend(member.size)
            if not member.isdir():
                yield member.name, tape.extractfile(member) if member.isreg() else None


# The cache of a machine.

_DIGEST = re.compile(r"[0-9a-f]{64}\Z")

LEFT_BEHIND_S = 86_400.0

_log = structlog.get_logger("headwater.adapters")


class LoraFolder(NamedTuple):
    """An adapter in the cache. `digest` is SHA-256 over its files, hexadecimal."""

    folder: Path
    digest: str
    rank: int
    base: str


class LoraCache:
    """Fetches adapters into `root` and retains those in use.

    A fetched adapter is retained until it was dropped as often as it was fetched, as an engine may read its files again. A
    shared lock on the folder protects it from other processes.
    """

    def __init__(self, root: Path, policy: LoraPolicy) -> None:
        self.policy = policy
        self._root = root
        self._fetching: dict[tuple[str, str], asyncio.Task[LoraFolder]] = {}
        self._locked: dict[str, int] = {}
        self._users: Counter[str] = Counter()

    async def fetch(self, source: str, digest: str = "") -> LoraFolder:
        """Fetch the adapter at `source`; with a known `digest` from the cache, where it is there.

        Concurrent calls for the same adapter share one download, which continues when one of them is cancelled.
        Raises `LoraError`, and `EngineUnavailable` for a package that is missing.
        """
        if digest and not _DIGEST.match(digest):
            raise LoraError(400, f"{digest!r} is not a digest")
        place = self.policy.admit(source)
        while True:
            folder = await asyncio.shield(self._shared(place, digest))
            if self._lock(folder.digest):
                self._users[folder.digest] += 1
                return folder

    def drop(self, digest: str) -> None:
        """Release one use of this adapter."""
        self._users[digest] -= 1
        self._unlock(digest)

    def close(self) -> None:
        """Release all adapters."""
        for task in self._fetching.values():
            task.cancel()
        self._users.clear()
        for digest in list(self._locked):
            self._unlock(digest)

    def _shared(self, source: Source, digest: str) -> "asyncio.Task[LoraFolder]":
        key = (source.text, digest)
        task = self._fetching.get(key)
        if task is None:
            task = asyncio.create_task(self._fetch(source, digest), name=f"fetch {source.text}")
            self._fetching[key] = task
            task.add_done_callback(lambda done: self._fetched(key, done))
        return task

    def _fetched(self, key: tuple[str, str], task: "asyncio.Task[LoraFolder]") -> None:
        del self._fetching[key]
        # Waiting callers get the exception; there may be none left.
        if not task.cancelled() and task.exception() is None:
            self._unlock(task.result().digest)

    def _unlock(self, digest: str) -> None:
        if self._users[digest] <= 0:
            del self._users[digest]
            handle = self._locked.pop(digest, None)
            if handle is not None:
                os.close(handle)

    async def _fetch(self, source: Source, digest: str) -> LoraFolder:
        if digest and self._lock(digest):
            return await asyncio.to_thread(self._known, digest)
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=".staging-", dir=self._root))
        budget = Budget(self.policy.bytes_max)
        fetching = in_own_thread(_fetch_files, source, staging, self.policy, budget)
        try:
            async with asyncio.timeout(self.policy.fetch_s):
                await asyncio.wrap_future(fetching)
                folder = await asyncio.to_thread(self._store, staging, source, digest)
        except TimeoutError as error:
            raise LoraError(502, f"{source.text} was not fetched within {self.policy.fetch_s:g} s") from error
        except OSError as error:
            raise LoraError(502, f"{source.text} cannot be stored in {self._root}: {error}") from error
        finally:
            budget.cancel()
            shutil.rmtree(staging, ignore_errors=True)
            # And when the thread has ended: a file that it made in a folder that was being removed would stay.
            fetching.add_done_callback(lambda _: shutil.rmtree(staging, ignore_errors=True))
        _log.info("adapter_fetched", source=source.text, digest=folder.digest, rank=folder.rank)
        await asyncio.to_thread(self._prune, folder.folder)
        return folder

    def _store(self, staging: Path, source: Source, expected_digest: str) -> LoraFolder:
        """Validate the fetched files and move them to the folder of their digest, atomically."""
        read = lora_sources.read(staging)
        digest = lora_sources.digest(staging)
        if expected_digest and digest != expected_digest:
            raise LoraError(
                409,
                f"{source.text} has other weights ({digest[:12]}) than the adapter was first loaded with "
                f"({expected_digest[:12]}): use another name for the new ones, or remove the old adapter first",
            )
        for name in lora_sources.FILES:
            _sync(staging / name)
        _sync(staging)
        folder = self._root / digest
        # Another process may remove the folder between the two: then ours is moved there.
        while not self._lock(digest):
            try:
                os.rename(staging, folder)
            except OSError:
                if not folder.is_dir():
                    raise
            else:
                _sync(self._root)
        return LoraFolder(folder, digest, *read)

    def _known(self, digest: str) -> LoraFolder:
        folder = self._root / digest
        os.utime(folder)
        return LoraFolder(folder, digest, *lora_sources.read(folder))

    def _lock(self, digest: str) -> bool:
        """Lock a folder of the cache against removal by any process; False if it does not exist."""
        if digest in self._locked:
            return True
        folder = self._root / digest
        try:
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            is_locked = folder.stat().st_ino == os.fstat(handle).st_ino
        except (BlockingIOError, FileNotFoundError):
            is_locked = False  # it is being removed
        if not is_locked:
            os.close(handle)
            return False
        self._locked[digest] = handle
        return True

    def _prune(self, newest: Path) -> None:
        """Remove the least recently used unused adapters until the cache is within its limit.

        Incomplete folders of processes that died while fetching are removed as well.
        """
        now_s = newest.stat().st_mtime
        for path in self._root.glob(".staging-*"):
            if _size(path)[1] < now_s - LEFT_BEHIND_S:
                shutil.rmtree(path, ignore_errors=True)
        folders = [path for path in self._root.iterdir() if path.is_dir() and not path.name.startswith(".")]
        sizes = {path: _size(path) for path in folders}
        total = sum(size for size, _ in sizes.values())
        for path in sorted(folders, key=lambda folder: sizes[folder][1]):
            if total <= self.policy.cache_bytes_max:
                return
            if path.name not in self._locked and _remove(path):
                total -= sizes[path][0]
                _log.info("adapter_dropped_from_cache", digest=path.name)


def _fetch_files(source: Source, staging: Path, policy: LoraPolicy, budget: Budget) -> None:
    """Fetch both files of the adapter into `staging`."""
    place = origin(source, policy, budget)
    seen: list[str] = []
    if source.archive and source.scheme != "hf":
        packed = staging / ".archive"
        place.save("", packed)
        budget.reset()
        seen = unpack(packed, staging, budget, source.text)
        packed.unlink()
    else:
        for name in lora_sources.FILES:
            try:
                place.save(name, staging / name)
            except SourceMissing:
                if name == lora_sources.CONFIG:
                    raise
                seen = place.names()
    if not (staging / lora_sources.WEIGHTS).exists():
        raise lora_sources.no_weights(source.text, seen)
    if not (staging / lora_sources.CONFIG).exists():
        raise SourceMissing(f"{lora_sources.CONFIG} in {source.text}")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _size(folder: Path) -> tuple[int, float]:
    """Bytes in a folder, and the time of its last use."""
    try:
        return sum(path.stat().st_size for path in folder.iterdir()), folder.stat().st_mtime
    except FileNotFoundError:
        return 0, 0.0


def _remove(folder: Path) -> bool:
    """Remove a folder unless a process has locked it."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Renamed first, so that other processes see no folder rather than an incomplete one.
        away = folder.with_name(f".away-{folder.name}-{os.getpid()}")
        os.rename(folder, away)
        shutil.rmtree(away, ignore_errors=True)
        return True
    except (BlockingIOError, FileNotFoundError):
        return False
    finally:
        os.close(handle)
