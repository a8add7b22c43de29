"""Which of a model's files an engine needs, what they amount to, and whether they are what was announced."""

import fcntl
import hashlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Final, NamedTuple

FORMATS: Final = (("*.safetensors",), ("*.bin",), ("*.pt", "*.pth"))
"""Formats of weights that engines load, the best first: a model's files of other formats are copies of the same."""

OTHER_WEIGHTS: Final = (
    *("*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data", "*.ot", "*.tflite", "*.ckpt", "*.mlmodel"),
    *("*.npz", "*.nemo", "*.llamafile", "*.mlpackage/*", "onnx/*", "openvino/*", "coreml/*"),
)
"""Formats that no engine loads from a folder."""

COPIES: Final = ("original/*", "metal/*", "consolidated*.safetensors", "consolidated*.pth")
"""Copies of a model's weights in its maker's own layout, where the common one is there too."""

NO_USE: Final = ("*.png", "*.jpg", "*.jpeg", "*.gif", "*.mp4", "*.pdf", "*.md", ".gitattributes", "*.ipynb")

CHUNK_BYTES: Final = 4 << 20
PROGRESS_S: Final = 10.0
TERMINAL_PROGRESS_S: Final = 0.5


class DownloadFailed(Exception):
    """A model cannot be had; the text says why, and what to do."""


class RemoteFile(NamedTuple):
    """A file as its source announces it. `digest` is SHA-256 in hex, Git's SHA-1 in hex, or another mark of its contents."""

    name: str
    size: int
    digest: str = ""


def choose(files: Iterable[RemoteFile], *, weights: bool) -> list[RemoteFile]:
    """The files that serve a model: one format of its weights, or none of them, and everything small but pictures and pages.

    Raises `DownloadFailed` for a model that has its weights in formats that no engine loads from a folder.
    """
    listed = [one for one in files if not _matches(one.name, NO_USE)]
    other = [one for one in listed if _matches(one.name, OTHER_WEIGHTS)]
    known = [one for one in listed if one not in other]
    heavy = [one for one in known if _matches(one.name, [each for form in FORMATS for each in form])]
    small = [one for one in known if one not in heavy and not _matches(one.name, COPIES)]
    if not weights:
        return small
    common = [one for one in heavy if not _matches(one.name, COPIES)]
    heavy = common or heavy
    for form in FORMATS:
        chosen = [one for one in heavy if _matches(one.name, form)]
        if chosen:
            return small + _without_variants(chosen)
    if other:
        raise DownloadFailed(
            f"it has weights as {other[0].name} only, which engines do not load from a folder; "
            "give a model with *.safetensors"
        )
    return small


def _without_variants(files: list[RemoteFile]) -> list[RemoteFile]:
    """Without `model.fp16.safetensors` where `model.safetensors` is there too."""
    names = {one.name for one in files}

    def plain(name: str) -> str:
        stem, _, ending = name.rpartition(".")
        return f"{stem.rpartition('.')[0]}.{ending}"

    return [one for one in files if plain(one.name) not in names or plain(one.name) == one.name]


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, each) or fnmatch(name.rpartition("/")[2], each) for each in patterns)


def verify(path: Path, announced: RemoteFile) -> str:
    """What is wrong with a file that was downloaded; "" if it is what was announced, as far as its digest is of a known kind."""
    size = path.stat().st_size
    if size != announced.size:
        return f"{announced.name} has {size} bytes, announced were {announced.size}"
    if len(announced.digest) == 64:
        digest = hashlib.sha256()
    elif len(announced.digest) == 40:
        digest = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    else:
        return ""
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    if digest.hexdigest() != announced.digest:
        return f"{announced.name} has the digest {digest.hexdigest()}, announced was {announced.digest}"
    return ""


def check_space(missing: int, folder: Path) -> None:
    """Raises `DownloadFailed` if `missing` bytes do not fit into `folder`."""
    free = shutil.disk_usage(folder).free
    if missing > free:
        raise DownloadFailed(f"{_gb(missing)} are to be downloaded, and {folder} has room for {_gb(free)}")


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold the lock of one download for this machine; waits for another process that holds it. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process, which downloads {what}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def progress(what: str, total: int, count: Callable[[], int]) -> Iterator[None]:
    """Print within the block how much of `total` bytes is there, by `count`: on a terminal in one line, else every 10 s."""
    began, ended, first = time.monotonic(), threading.Event(), count()
    terminal = sys.stderr.isatty()

    def line() -> str:
        there, seconds = count(), max(0.001, time.monotonic() - began)
        rate = max(0, there - first) / seconds / 1e6
        return (
            f"downloading {what}: {_gb(there)} of {_gb(total)} ({there / max(1, total):.0%}), {rate:.0f} MB/s"
        )

    def show() -> None:
        while not ended.wait(TERMINAL_PROGRESS_S if terminal else PROGRESS_S):
            print(f"\r{line()}\033[K" if terminal else line(), end="" if terminal else "\n", file=sys.stderr)
            sys.stderr.flush()

    say(f"downloading {what}: {_gb(total)}, of which {_gb(first)} are there")
    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        if terminal:
            print(f"\r{line()}\033[K", file=sys.stderr)


def bytes_of(paths: Iterable[Path]) -> int:
    """The sizes of these files, as far as they are there."""
    total = 0
    for path in paths:
        try:
            total += os.stat(path).st_size
        except FileNotFoundError:
            continue
    return total


def say(text: str) -> None:
    """Print a line for the person who started the download."""
    print(f"headwater: {text}", file=sys.stderr, flush=True)


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
