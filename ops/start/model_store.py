"""Download of a model from a bucket (S3, Google, Azure) or a web server into a folder of Headwater's cache.

Keys, regions and endpoints come from the clouds' own environment variables. A web server has no listing: it is asked for the files that
models have, and for those that an index of weights names. A change at the source gives another folder, whose name has a digest of
all names, sizes and entity tags. An interrupted file is continued where it ended, if its source still has the same.
"""

import fcntl
import hashlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import obstore
from obstore.store import from_url

from headwater.engines import logs
from headwater.ops.start.model_source import DownloadFailed

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


class RemoteFile(NamedTuple):
    """A file as its source announces it. `digest` is SHA-256 in hex, Git's SHA-1 in hex, or another mark of its contents."""

    name: str
    size: int
    digest: str = ""


def choose(files: Iterable[RemoteFile], *, weights: bool) -> list[RemoteFile]:
    """The files that serve a model: one format of its weights, or none of them, and everything small but pictures and pages.

    Raises `DownloadFailed` for a model that has its weights in formats that no engine loads from a folder.
    """
    listed = [file for file in files if not _matches(file.name, NO_USE)]
    other = [file for file in listed if _matches(file.name, OTHER_WEIGHTS)]
    usable = [file for file in listed if file not in other]
    heavy = [file for file in usable if _matches(file.name, [each for form in FORMATS for each in form])]
    small = [file for file in usable if file not in heavy and not _matches(file.name, COPIES)]
    if not weights:
        return small
    common = [file for file in heavy if not _matches(file.name, COPIES)]
    heavy = common or heavy
    for form in FORMATS:
        chosen = [file for file in heavy if _matches(file.name, form)]
        if chosen:
            return small + _without_variants(chosen)
    if other:
        raise DownloadFailed(
            f"it has weights as {other[0].name} only, which engines do not load from a folder; "
            "give a model with *.safetensors"
        )
    return small


def _without_variants(files: list[RemoteFile]) -> list[RemoteFile]:
    """Return the files without variants: no `model.fp16.safetensors` where there is a `model.safetensors`."""
    names = {file.name for file in files}

    def plain(name: str) -> str:
        stem, _, ending = name.rpartition(".")
        return f"{stem.rpartition('.')[0]}.{ending}"

    return [file for file in files if plain(file.name) not in names or plain(file.name) == file.name]


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, each) or fnmatch(name.rpartition("/")[2], each) for each in patterns)


def verify(path: Path, announced: RemoteFile) -> str:
    """Return what is wrong with a file that was downloaded; "" if it is what was announced, as far as its digest is of a known kind."""
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
def locked(path: Path, label: str) -> Iterator[None]:
    """Hold the lock of one download for this machine; waits for another process that holds it. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logs.say(f"waiting for another process, which downloads {label}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def progress(label: str, total: int, count: Callable[[], int]) -> Iterator[None]:
    """Print within the block how much of `total` bytes is there, by `count`: on a terminal in one line, else every 10 s."""
    began, ended, first = time.monotonic(), threading.Event(), count()
    terminal = sys.stderr.isatty() and not logs.is_json()

    def line() -> str:
        present_bytes, seconds = count(), max(0.001, time.monotonic() - began)
        rate = max(0, present_bytes - first) / seconds / 1e6
        return f"downloading {label}: {_gb(present_bytes)} of {_gb(total)} ({present_bytes / max(1, total):.0%}), {rate:.0f} MB/s"

    def show() -> None:
        while not ended.wait(TERMINAL_PROGRESS_S if terminal else PROGRESS_S):
            if terminal:
                print(f"\r{line()}\033[K", end="", file=sys.stderr, flush=True)
            else:
                logs.say(line())

    logs.say(f"downloading {label}: {_gb(total)}, of which {_gb(first)} are there")
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


def load(path: Path, default: Any) -> Any:
    """The content of a JSON file, or `default` if there is none that can be read."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return default


def replace(path: Path, text: str) -> None:
    """Write a file so that readers see the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.write_text(text)
    new.replace(path)


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


# The download.

ATTEMPTS: Final = 5
INDEX: Final = "model.safetensors.index.json"
WEIGHTS: Final = "model.safetensors"

KNOWN: Final = (
    *("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"),
    *("chat_template.json", "additional_chat_templates/tool_use.jinja"),
    *("special_tokens_map.json", "added_tokens.json", "tokenizer.model", "vocab.json", "merges.txt"),
    *("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"),
    *("hf_quant_config.json", "quantize_config.json", INDEX),
)  # fmt: skip
"""What a model's folder may have, for servers that list nothing."""


def download(url: str, cache: Path, *, weights: bool) -> Path:
    """The folder of a model's files at `url`. Raises `DownloadFailed`."""
    parts = urlsplit(url)
    options: dict[str, Any] = {"client_options": {"allow_http": True}} if parts.scheme == "http" else {}
    stem = f"{parts.path.strip('/').rpartition('/')[2] or parts.netloc}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"
    place = cache / "models"
    latest = place / f"{stem}.json"
    try:
        # Wrong settings of a cloud, such as no account, show here already.
        store = from_url(url, **options)
        with locked(place / f".{stem}.lock", url):
            return _StoreDownload(store, url, place, stem, weights).run()
    except obstore.exceptions.BaseError as error:
        return _before(latest, url, weights, _short(error))
    except OSError as error:
        return _before(latest, url, weights, f"{type(error).__name__}: {_short(error)}")


def _before(latest: Path, url: str, weights: bool, reason: str) -> Path:
    """Return what was downloaded before, if it serves. Raises `DownloadFailed`."""
    recorded = load(latest, {})
    folder = latest.parent / str(recorded.get("folder", ""))
    if recorded and folder.is_dir() and (recorded["weights"] or not weights):
        logs.say(f"{url}: {reason}; serving what was downloaded before")
        return folder
    raise DownloadFailed(f"{reason}. What was downloaded stays: start again to continue")


class _StoreDownload:
    def __init__(self, store: Any, url: str, place: Path, stem: str, weights: bool) -> None:
        self._store, self._url, self._place, self._stem = store, url, place, stem
        self._weights = weights

    def run(self) -> Path:
        files = choose(self._listed(), weights=self._weights)
        if not any(file.name == "config.json" for file in files):
            raise DownloadFailed("there is no config.json: give the URL of a folder in Hugging Face's layout")
        text = "".join(f"{file.name} {file.size} {file.digest}\n" for file in sorted(files))
        version = hashlib.sha256(text.encode()).hexdigest()[:12]
        folder = self._place / f"{self._stem}-{version}"
        if not folder.is_dir():
            staging = self._place / f".{folder.name}.part"
            self._fetch_all(files, staging)
            staging.rename(folder)
        self._remember(folder)
        return folder

    def _listed(self) -> list[RemoteFile]:
        if urlsplit(self._url).scheme in ("http", "https"):
            return self._asked()
        listed = [
            RemoteFile(str(entry["path"]), int(entry["size"]), str(entry["e_tag"] or ""))
            for chunk in obstore.list(self._store)
            for entry in chunk
        ]
        # A folder of its own is an object with no name in some stores.
        return [entry for entry in listed if entry.name and not entry.name.endswith("/")]

    def _asked(self) -> list[RemoteFile]:
        files = [file for name in KNOWN if (file := self._head(name)) is not None]
        if self._weights:
            shards = [WEIGHTS]
            if any(file.name == INDEX for file in files):
                index = json.loads(bytes(obstore.get(self._store, INDEX).bytes()))
                shards = sorted(set(index.get("weight_map", {}).values()))
            for name in shards:
                file = self._head(str(name))
                if file is None and name != WEIGHTS:
                    raise DownloadFailed(f"there is no {name}, which {INDEX} names")
                files += [file] if file is not None else []
        return files

    def _head(self, name: str) -> RemoteFile | None:
        try:
            meta = obstore.head(self._store, name)
        except FileNotFoundError:
            return None
        return RemoteFile(name, int(meta["size"]), str(meta["e_tag"] or meta["last_modified"]))

    def _fetch_all(self, files: list[RemoteFile], staging: Path) -> None:
        staging.mkdir(parents=True, exist_ok=True)
        paths = [staging / remote_file.name for remote_file in files]
        total = sum(remote_file.size for remote_file in files)
        check_space(total - bytes_of(paths), staging)
        with progress(self._url, total, lambda: bytes_of(paths)):
            for remote_file, path in zip(files, paths, strict=True):
                self._fetch(remote_file, path)
        for path in paths:
            with path.open("rb") as file:
                os.fsync(file.fileno())

    def _fetch(self, remote_file: RemoteFile, path: Path) -> None:
        """Fetch a file, or the rest of it. Raises the store's error after the last attempt."""
        path.parent.mkdir(parents=True, exist_ok=True)
        for attempt in range(ATTEMPTS):
            try:
                self._append(remote_file, path)
                break
            except FileNotFoundError:
                raise
            except (obstore.exceptions.BaseError, OSError) as error:
                if attempt + 1 == ATTEMPTS:
                    raise
                logs.say(f"{self._url}/{remote_file.name} broke off: {_short(error)}; continuing")
        problem = verify(path, remote_file)
        if problem:
            path.unlink()
            raise DownloadFailed(f"{problem}: removed")

    def _append(self, remote_file: RemoteFile, path: Path) -> None:
        present_bytes = path.stat().st_size if path.exists() else 0
        if present_bytes > remote_file.size:
            path.unlink()
            present_bytes = 0
        if present_bytes == remote_file.size and path.exists():
            return
        result = obstore.get(
            self._store,
            remote_file.name,
            options={"range": {"offset": present_bytes}} if present_bytes else None,
        )
        tag = str(result.meta["e_tag"] or result.meta["last_modified"])
        if remote_file.digest and _opaque(tag) != _opaque(remote_file.digest):
            path.unlink(missing_ok=True)
            raise DownloadFailed(f"{remote_file.name} changed while it was downloaded: start again")
        with path.open("ab") as file:
            for chunk in result.stream(min_chunk_size=CHUNK_BYTES):
                file.write(chunk)

    def _remember(self, folder: Path) -> None:
        """Name the newest folder, and remove what older downloads of the same source left."""
        document = {"folder": folder.name, "weights": self._weights}
        replace(self._place / f"{self._stem}.json", json.dumps(document))
        for part in self._place.glob(f".{self._stem}-*.part"):
            shutil.rmtree(part, ignore_errors=True)


def _opaque(tag: str) -> str:
    """An entity tag without what is around it: Azure's listings, unlike its headers, have tags without quotes."""
    return tag.removeprefix("W/").strip('"')


def _short(error: BaseException) -> str:
    """The first line of an error: those of the library print their whole structure behind it."""
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
