"""A model in a bucket (S3, Google, Azure) or on a web server, downloaded into a folder of Headwater's cache.

Keys, regions and endpoints come from the clouds' own environment variables. A web server has no listing: it is asked for the files that
models have, and for those that an index of weights names. What changes at the source is another folder: the name has a digest of
all names, sizes and entity tags. A file that breaks off is continued where it ended, if its source still has the same.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import obstore
from obstore.store import from_url

from headwater.ops.model_download.files import (
    CHUNK_BYTES,
    DownloadFailed,
    RemoteFile,
    bytes_of,
    check_space,
    choose,
    locked,
    progress,
    say,
    verify,
)

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
    secure = parts.scheme != "http"
    store = from_url(url, client_options={"allow_http": not secure}) if not secure else from_url(url)
    stem = f"{parts.path.strip('/').rpartition('/')[2] or parts.netloc}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"
    place = cache / "models"
    latest = place / f"{stem}.json"
    try:
        with locked(place / f".{stem}.lock", url):
            return _StoreDownload(store, url, place, stem, weights).run()
    except obstore.exceptions.BaseError as error:
        return _before(latest, url, weights, _short(error))
    except OSError as error:
        return _before(latest, url, weights, f"{type(error).__name__}: {error}")


def _before(latest: Path, url: str, weights: bool, reason: str) -> Path:
    """What was downloaded before, if it serves. Raises `DownloadFailed`."""
    try:
        known = json.loads(latest.read_text())
    except (OSError, ValueError):
        known = {}
    folder = latest.parent / str(known.get("folder", ""))
    if known and folder.is_dir() and (known["weights"] or not weights):
        say(f"{url}: {reason}; serving what was downloaded before")
        return folder
    raise DownloadFailed(f"{reason}. What was downloaded stays: start again to continue")


class _StoreDownload:
    def __init__(self, store: Any, url: str, place: Path, stem: str, weights: bool) -> None:
        self._store, self._url, self._place, self._stem = store, url, place, stem
        self._weights = weights

    def run(self) -> Path:
        wanted = choose(self._listed(), weights=self._weights)
        if not any(one.name == "config.json" for one in wanted):
            raise DownloadFailed("there is no config.json: give the URL of a folder in Hugging Face's layout")
        text = "".join(f"{one.name} {one.size} {one.digest}\n" for one in sorted(wanted))
        version = hashlib.sha256(text.encode()).hexdigest()[:12]
        folder = self._place / f"{self._stem}-{version}"
        if not folder.is_dir():
            staging = self._place / f".{folder.name}.part"
            self._fetch_all(wanted, staging)
            staging.rename(folder)
        self._remember(folder)
        return folder

    def _listed(self) -> list[RemoteFile]:
        if urlsplit(self._url).scheme in ("http", "https"):
            return self._asked()
        found = [
            RemoteFile(str(one["path"]), int(one["size"]), str(one["e_tag"] or ""))
            for chunk in obstore.list(self._store)
            for one in chunk
        ]
        # A folder of its own is an object with no name in some stores.
        return [one for one in found if one.name and not one.name.endswith("/")]

    def _asked(self) -> list[RemoteFile]:
        found = [one for name in KNOWN if (one := self._head(name)) is not None]
        if self._weights:
            shards = [WEIGHTS]
            if any(one.name == INDEX for one in found):
                index = json.loads(bytes(obstore.get(self._store, INDEX).bytes()))
                shards = sorted(set(index.get("weight_map", {}).values()))
            for name in shards:
                one = self._head(str(name))
                if one is None and name != WEIGHTS:
                    raise DownloadFailed(f"there is no {name}, which {INDEX} names")
                found += [one] if one is not None else []
        return found

    def _head(self, name: str) -> RemoteFile | None:
        try:
            meta = obstore.head(self._store, name)
        except FileNotFoundError:
            return None
        return RemoteFile(name, int(meta["size"]), str(meta["e_tag"] or meta["last_modified"]))

    def _fetch_all(self, wanted: list[RemoteFile], staging: Path) -> None:
        staging.mkdir(parents=True, exist_ok=True)
        paths = [staging / one.name for one in wanted]
        total = sum(one.size for one in wanted)
        check_space(total - bytes_of(paths), staging)
        with progress(self._url, total, lambda: bytes_of(paths)):
            for one, path in zip(wanted, paths, strict=True):
                self._fetch(one, path)
        for path in paths:
            with path.open("rb") as file:
                os.fsync(file.fileno())

    def _fetch(self, one: RemoteFile, path: Path) -> None:
        """Fetch a file, or the rest of it. Raises the store's error after the last attempt."""
        path.parent.mkdir(parents=True, exist_ok=True)
        for attempt in range(ATTEMPTS):
            try:
                self._append(one, path)
                break
            except FileNotFoundError:
                raise
            except (obstore.exceptions.BaseError, OSError) as error:
                if attempt + 1 == ATTEMPTS:
                    raise
                say(f"{self._url}/{one.name} broke off: {_short(error)}; continuing")
        problem = verify(path, one)
        if problem:
            path.unlink()
            raise DownloadFailed(f"{problem}: removed")

    def _append(self, one: RemoteFile, path: Path) -> None:
        there = path.stat().st_size if path.exists() else 0
        if there > one.size:
            path.unlink()
            there = 0
        if there == one.size and path.exists():
            return
        result = obstore.get(self._store, one.name, options={"range": {"offset": there}} if there else None)
        tag = str(result.meta["e_tag"] or result.meta["last_modified"])
        if one.digest and tag != one.digest:
            path.unlink(missing_ok=True)
            raise DownloadFailed(f"{one.name} changed while it was downloaded: start again")
        with path.open("ab") as file:
            for chunk in result.stream(min_chunk_size=CHUNK_BYTES):
                file.write(chunk)

    def _remember(self, folder: Path) -> None:
        """Name the newest folder, and remove what older downloads of the same source left."""
        latest = self._place / f"{self._stem}.json"
        new = latest.with_suffix(".new")
        new.write_text(json.dumps({"folder": folder.name, "weights": self._weights}))
        new.replace(latest)
        for part in self._place.glob(f".{self._stem}-*.part"):
            shutil.rmtree(part, ignore_errors=True)


def _short(error: BaseException) -> str:
    """The first line of an error: those of the library print their whole structure behind it."""
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
