"""The cache of adapters on this machine: one folder per digest, whole or not there, shared by all its workers."""

import asyncio
import fcntl
import os
import re
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import structlog

from headwater.engines.adapter_files import peft
from headwater.engines.adapter_files.archive import unpack
from headwater.engines.adapter_files.budget import Budget
from headwater.engines.adapter_files.errors import AdapterError, SourceMissing
from headwater.engines.adapter_files.origins import Origin, origin
from headwater.engines.adapter_files.policy import AdapterPolicy, Source

_DIGEST = re.compile(r"[0-9a-f]{64}\Z")

LEFT_BEHIND_S = 86_400.0

_log = structlog.get_logger("headwater.adapters")


class AdapterFolder(NamedTuple):
    """An adapter on this machine. `digest` is SHA-256 over its files, hexadecimal."""

    folder: Path
    digest: str
    rank: int
    base: str


class AdapterFiles:
    """Fetches adapters into `root` and keeps those that are in use there.

    What `fetch` gave stays until it was dropped as often: an engine may read its files again. A shared lock on the
    folder says so to other processes.
    """

    def __init__(self, root: Path, policy: AdapterPolicy) -> None:
        self.policy = policy
        self._root = root
        self._fetching: dict[tuple[str, str], asyncio.Task[AdapterFolder]] = {}
        self._locked: dict[str, int] = {}
        self._users: Counter[str] = Counter()

    async def fetch(self, source: str, digest: str = "") -> AdapterFolder:
        """The adapter at `source`, with this `digest` if it is known: then from the cache, where it is there.

        Whoever asks for the same at the same time waits for the same download; it goes on when one of them gives up.
        Raises `AdapterError`, and `EngineUnavailable` for a package that is missing.
        """
        if digest and not _DIGEST.match(digest):
            raise AdapterError(400, f"{digest!r} is no digest")
        place = self.policy.admit(source)
        while True:
            found = await asyncio.shield(self._shared(place, digest))
            if self._hold(found.digest):
                self._users[found.digest] += 1
                return found

    def drop(self, digest: str) -> None:
        """One use of this adapter is over."""
        self._users[digest] -= 1
        self._let_go(digest)

    def close(self) -> None:
        """Drop everything."""
        for task in self._fetching.values():
            task.cancel()
        self._users.clear()
        for digest in list(self._locked):
            self._let_go(digest)

    def _shared(self, source: Source, digest: str) -> "asyncio.Task[AdapterFolder]":
        key = (source.text, digest)
        task = self._fetching.get(key)
        if task is None:
            task = asyncio.create_task(self._fetch(source, digest), name=f"fetch {source.text}")
            self._fetching[key] = task
            task.add_done_callback(lambda done: self._fetched(key, done))
        return task

    def _fetched(self, key: tuple[str, str], task: "asyncio.Task[AdapterFolder]") -> None:
        del self._fetching[key]
        # Whoever waits gets the exception; maybe nobody does any more.
        if not task.cancelled() and task.exception() is None:
            self._let_go(task.result().digest)

    def _let_go(self, digest: str) -> None:
        if self._users[digest] <= 0:
            del self._users[digest]
            handle = self._locked.pop(digest, None)
            if handle is not None:
                os.close(handle)

    async def _fetch(self, source: Source, digest: str) -> AdapterFolder:
        if digest and self._hold(digest):
            return await asyncio.to_thread(self._known, digest)
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=".staging-", dir=self._root))
        budget = Budget(self.policy.bytes_max)
        try:
            async with asyncio.timeout(self.policy.fetch_s):
                await _bring(source, staging, self.policy, budget)
                found = await asyncio.to_thread(self._take_in, staging, source, digest)
        except TimeoutError as error:
            raise AdapterError(
                502, f"{source.text} did not come within {self.policy.fetch_s:g} s (--lora-fetch-s)"
            ) from error
        except OSError as error:
            raise AdapterError(502, f"{source.text} can not be kept in {self._root}: {error}") from error
        finally:
            budget.give_up()
            shutil.rmtree(staging, ignore_errors=True)
        _log.info("adapter_fetched", source=source.text, digest=found.digest, rank=found.rank)
        await asyncio.to_thread(self._prune, found.folder)
        return found

    def _take_in(self, staging: Path, source: Source, wanted: str) -> AdapterFolder:
        """Check what came and put it under its digest, all at once."""
        read = peft.read(staging)
        digest = peft.digest(staging)
        if wanted and digest != wanted:
            raise AdapterError(
                409,
                f"{source.text} holds other weights ({digest[:12]}) than the adapter was first loaded with "
                f"({wanted[:12]}): give the new ones a name of their own, or forget the old adapter first",
            )
        for name in peft.FILES:
            _sync(staging / name)
        _sync(staging)
        folder = self._root / digest
        # Another process may take the folder away between the two: then ours goes there.
        while not self._hold(digest):
            try:
                os.rename(staging, folder)
            except OSError:
                if not folder.is_dir():
                    raise
            else:
                _sync(self._root)
        return AdapterFolder(folder, digest, *read)

    def _known(self, digest: str) -> AdapterFolder:
        folder = self._root / digest
        os.utime(folder)
        return AdapterFolder(folder, digest, *peft.read(folder))

    def _hold(self, digest: str) -> bool:
        """Keep a folder of the cache where it is, for all processes; False if it is not there."""
        if digest in self._locked:
            return True
        folder = self._root / digest
        try:
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            there = folder.stat().st_ino == os.fstat(handle).st_ino
        except (BlockingIOError, FileNotFoundError):
            there = False  # it is being taken away at this moment
        if not there:
            os.close(handle)
            return False
        self._locked[digest] = handle
        return True

    def _prune(self, newest: Path) -> None:
        """Drop what was used longest ago and is in use nowhere, until the cache is small enough.

        What processes left behind that died while they fetched goes as well.
        """
        now_s = newest.stat().st_mtime
        for path in self._root.glob(".staging-*"):
            if _size(path)[1] < now_s - LEFT_BEHIND_S:
                shutil.rmtree(path, ignore_errors=True)
        folders = [path for path in self._root.iterdir() if path.is_dir() and not path.name.startswith(".")]
        sizes = {path: _size(path) for path in folders}
        total = sum(size for size, _ in sizes.values())
        for path in sorted(folders, key=lambda one: sizes[one][1]):
            if total <= self.policy.cache_bytes_max:
                return
            if path.name not in self._locked and _remove(path):
                total -= sizes[path][0]
                _log.info("adapter_dropped_from_cache", digest=path.name)


async def _bring(source: Source, staging: Path, policy: AdapterPolicy, budget: Budget) -> None:
    """Both files of the adapter into `staging`."""
    place: Origin = origin(source, policy)
    seen: list[str] = []
    if source.archive and source.scheme != "hf":
        packed = staging / ".archive"
        await place.save("", packed, budget)
        budget.again()
        seen = await asyncio.to_thread(unpack, packed, staging, budget, source.text)
        packed.unlink()
    else:
        for name in peft.FILES:
            try:
                await place.save(name, staging / name, budget)
            except SourceMissing:
                if name == peft.CONFIG:
                    raise
                seen = await place.names()
    if not (staging / peft.WEIGHTS).exists():
        raise peft.no_weights(source.text, seen)
    if not (staging / peft.CONFIG).exists():
        raise SourceMissing(f"{peft.CONFIG} in {source.text}")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _size(folder: Path) -> tuple[int, float]:
    """Bytes in a folder, and when it was used last."""
    try:
        return sum(path.stat().st_size for path in folder.iterdir()), folder.stat().st_mtime
    except FileNotFoundError:
        return 0, 0.0


def _remove(folder: Path) -> bool:
    """Take a folder away unless some process holds it."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Away under its name first: who comes now sees no folder, and not a half one.
        away = folder.with_name(f".away-{folder.name}-{os.getpid()}")
        os.rename(folder, away)
        shutil.rmtree(away, ignore_errors=True)
        return True
    except (BlockingIOError, FileNotFoundError):
        return False
    finally:
        os.close(handle)
