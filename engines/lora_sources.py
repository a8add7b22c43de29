"""Sources of adapters (folders, web servers, buckets and hubs): which are allowed, how files are fetched, and their validation.

An adapter's weights generate answers for the fleet's users, and fetching one makes a worker access an address named by a
client. So only listed sources are allowed: folders, hosts, organisations of a hub.

A web server is connected to at an address that was checked. This covers names that resolve to private addresses, names that resolve
differently the second time, numeric addresses, and every hop of a redirect.

Fetching blocks a thread of its own; a `Budget` ends it.
"""

import hashlib
import os
import shutil
import socket
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from http.client import HTTPException, HTTPResponse, IncompleteRead
from importlib import import_module
from ipaddress import ip_network
from pathlib import Path
from typing import IO, Any, NamedTuple
from urllib.parse import unquote, urljoin, urlsplit

import msgspec

from headwater.engines.engine import EngineError, EngineUnavailable
from headwater.engines.public_address import (
    PORTS,
    REDIRECTS,
    Network,
    WebAccess,
    WebUrl,
    connect_first,
    may_connect,
    request_file,
    request_target,
    resolve,
)
from headwater.engines.traits import LORA_CACHE_MIB, LORA_FETCH_S, LORA_MIB
from headwater.schemas.names import host_port


class LoraError(EngineError):
    """An adapter cannot be fetched or loaded. `status` follows HTTP, as in `schemas.control`."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class SourceMissing(LoraError):
    """The file does not exist at the source."""

    def __init__(self, missing: str) -> None:
        super().__init__(404, f"there is no {missing}")


# Allowed sources.

SCHEMES = ("file", "http", "https", "s3", "hf")
ARCHIVES = (".tar.gz", ".tgz", ".tar", ".zip")


class Source(NamedTuple):
    """A parsed source. `path` has no trailing slash; of a local one it is absolute, links resolved.

    `host` is a host with its port, a bucket, or a hub's organisation; `text` is the original text.
    """

    scheme: str
    host: str
    path: str
    text: str

    @property
    def archive(self) -> bool:
        """Is it an archive?"""
        return self.path.endswith(ARCHIVES)

    def within(self, prefix: "Source") -> bool:
        """Is it `prefix` or below it? Compares whole segments of the path."""
        if self.scheme != prefix.scheme or prefix.host not in ("", self.host):
            return False
        segments, prefix_segments = _segments(self.path), _segments(prefix.path)
        return segments[: len(prefix_segments)] == prefix_segments


class LoraPolicy(NamedTuple):
    """What may be fetched. `sources` are prefixes, `networks` are private addresses that HTTP may access.

    One adapter has at most `bytes_max`, also decompressed, and is fetched within `fetch_s` seconds. The cache is kept
    below `cache_bytes_max` by removing the least recently used adapters.
    """

    sources: tuple[Source, ...] = ()
    networks: tuple[Network, ...] = ()
    bytes_max: int = LORA_MIB << 20
    fetch_s: float = LORA_FETCH_S
    cache_bytes_max: int = LORA_CACHE_MIB << 20

    def admit(self, text: str) -> Source:
        """The source, if it is allowed. Raises `LoraError`."""
        source = parse(text)
        if not any(source.within(prefix) for prefix in self.sources):
            allowed = ", ".join(prefix.text for prefix in self.sources) or "nothing"
            raise LoraError(403, f"{text} is not an allowed source; --lora-sources allows {allowed}")
        return source


def parse(text: str, *, prefix: bool = False) -> Source:
    """Parse a source, or a `prefix` of sources. Raises `LoraError` 400."""
    scheme, mark, _ = text.partition("://")
    if not mark:
        return _local(text, text)
    if scheme not in SCHEMES:
        raise _bad(text, f"use a folder or {', '.join(f'{known_scheme}://' for known_scheme in SCHEMES)}")
    if scheme == "hf":
        return _hub(text, prefix=prefix)
    parts = urlsplit(text)
    if parts.username is not None or parts.password is not None:
        raise _bad(
            text.replace(parts.netloc, "…"),
            "a user name or password in it would be stored in the card and the log",
        )
    if parts.query or parts.fragment:
        raise _bad(
            f"{scheme}://{parts.netloc}{parts.path}", "a query would be stored in the card and the log"
        )
    if scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise _bad(text, "write file:///folder")
        return _local(unquote(parts.path), text)
    try:
        host, port = (parts.hostname or "").lower(), parts.port
    except ValueError as error:
        raise _bad(text, str(error)) from error
    path = unquote(parts.path)
    if not host and not prefix:
        raise _bad(text, "it has no host" if scheme != "s3" else "it has no bucket")
    if "\\" in path or "\0" in path or any(part in (".", "..") for part in path.split("/")):
        raise _bad(text, "its path must not contain '..'")
    number = port or PORTS.get(scheme, 0)
    return Source(scheme, host_port(host, number) if host and number else host, path.rstrip("/"), text)


def parse_sources(texts: Sequence[str]) -> tuple[Source, ...]:
    """The prefixes of a list of allowed sources. Raises `LoraError`."""
    return tuple(parse(text, prefix=True) for text in texts)


def parse_networks(texts: Sequence[str]) -> tuple[Network, ...]:
    """Networks in CIDR form. Raises `LoraError`."""
    try:
        return tuple(ip_network(text) for text in texts)
    except ValueError as error:
        raise LoraError(400, f"--lora-networks: {error}; write networks as 10.0.0.0/8") from error


def _local(path: str, text: str) -> Source:
    folder = Path(path).expanduser()
    if not folder.is_absolute() or "\0" in path:
        raise _bad(text, "a folder must be an absolute path")
    return Source("file", "", str(folder.resolve()), text)


def _hub(text: str, *, prefix: bool) -> Source:
    """hf://organisation/name[@revision]; a revision may contain slashes."""
    name, _, revision = text.removeprefix("hf://").rstrip("/").partition("@")
    organisation, _, repository = name.partition("/")
    parts = [part for part in (organisation, repository) if part]
    usable = all(part.replace("-", "").replace("_", "").replace(".", "").isalnum() for part in parts)
    if (
        not usable
        or (len(parts) < 2 and not prefix)
        or any(segment in (".", "..") for segment in revision.split("/"))
    ):
        raise _bad(text, "write hf://organisation/name or hf://organisation/name@revision")
    return Source("hf", organisation, repository + (f"/@{revision}" if revision else ""), text)


def _segments(path: str) -> list[str]:
    return [part for part in path.split("/") if part]


def _bad(text: str, why: str) -> LoraError:
    return LoraError(400, f"source {text} is not valid: {why}")


# The bounds of fetching one adapter.


class Budget:
    """Remaining bytes, and the connection in use. An archive counts twice: compressed and decompressed."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._left = limit
        self._given_up = False
        self._connection: socket.socket | None = None

    def spend(self, count: int) -> None:
        """Count bytes read. Raises `LoraError` beyond the limit, or after `cancel`."""
        self._left -= count
        if self._left < 0:
            raise LoraError(
                400, f"it has more than {self._limit >> 20} MiB, the limit for one adapter (--lora-max-mib)"
            )
        if self._given_up:
            raise LoraError(502, "it was cancelled")

    def save(self, chunks: Iterable[Any], to: Path) -> None:
        """Write these bytes to the new file `to`, counted as they arrive."""
        with to.open("xb") as file:
            for chunk in chunks:
                self.spend(len(chunk))
                file.write(chunk)

    def reset(self) -> None:
        """Reset to the full limit."""
        self._left = self._limit

    def watch(self, connection: socket.socket) -> None:
        """Have `cancel` end this connection, in place of the one before."""
        if self._connection is not None:
            self._connection.close()
        # A copy, which is of the same connection: TLS takes the socket itself over.
        self._connection = connection.dup()
        if self._given_up:
            self.cancel()

    def cancel(self) -> None:
        """Make the reading thread end soon: a thread cannot be cancelled directly."""
        self._given_up = True
        if self._connection is not None:
            with suppress(OSError), self._connection as connection:
                connection.shutdown(socket.SHUT_RDWR)


# Validation of an adapter's two files in PEFT's layout, and its rank.

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
FILES = (CONFIG, WEIGHTS)
PICKLED = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")

CONFIG_BYTES_MAX = 1 << 20
HEADER_BYTES_MAX = 64 << 20
"""The largest header of an adapter's safetensors file."""
CHUNK_BYTES = 1 << 20


def chunks(file: IO[bytes] | HTTPResponse) -> Iterator[bytes]:
    """What is left of a file, in pieces."""
    while chunk := file.read(CHUNK_BYTES):
        yield chunk


class Peft(NamedTuple):
    """An adapter's configuration. `base` is the model it was trained on, as its author named it, or empty."""

    rank: int
    base: str


def no_weights(source: str, seen: list[str]) -> LoraError:
    """The error for a source without `WEIGHTS`; `seen` are names of its other files, where known."""
    pickled = sorted(name for name in seen if name.startswith("adapter_") and name.endswith(PICKLED))
    if pickled:
        return LoraError(
            400,
            f"{source} has its weights in {pickled[0]}, which may run code when loaded: rejected. "
            f"Save them as {WEIGHTS}",
        )
    return LoraError(404, f"{source} has no {WEIGHTS} (weights are accepted as safetensors only)")


def read(folder: Path) -> Peft:
    """Check both files. Raises `LoraError` 400."""
    config = _config(folder / CONFIG)
    if config.get("peft_type", "LORA") != "LORA":
        raise LoraError(400, f"{CONFIG} is of a {config['peft_type']!r} adapter, not LoRA")
    ranks = [config.get("r"), *_patterns(config.get("rank_pattern"))]
    if not all(isinstance(rank, int) and rank > 0 for rank in ranks):
        raise LoraError(400, f"{CONFIG} has no valid rank: r = {config.get('r')!r}")
    rank = max(ranks)
    weights_rank = _rank_of_weights(folder / WEIGHTS)
    if weights_rank > rank:
        raise LoraError(400, f"{CONFIG} says rank {rank}, and {WEIGHTS} has matrices of rank {weights_rank}")
    base = config.get("base_model_name_or_path")
    return Peft(rank, base if isinstance(base, str) else "")


def digest(folder: Path) -> str:
    """SHA-256 over names and contents of both files."""
    folder_hash = hashlib.sha256()
    for name in FILES:
        file_hash = hashlib.sha256()
        with (folder / name).open("rb") as file:
            for chunk in chunks(file):
                file_hash.update(chunk)
        folder_hash.update(name.encode() + b"\0" + file_hash.digest())
    return folder_hash.hexdigest()


def same_base(base: str, names: tuple[str, ...]) -> bool:
    """Is `base` one of these models? Compares the last part of the name: hubs and folders have different prefixes."""
    last = base.rstrip("/").rpartition("/")[2].lower()
    return not last or last in {name.rstrip("/").rpartition("/")[2].lower() for name in names}


def _config(path: Path) -> dict[str, Any]:
    if path.stat().st_size > CONFIG_BYTES_MAX:
        raise LoraError(400, f"{CONFIG} is larger than {CONFIG_BYTES_MAX >> 20} MiB")
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise LoraError(400, f"{CONFIG} is not readable: {error}") from error


def _patterns(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else []


def _rank_of_weights(path: Path) -> int:
    """The largest rank among the A matrices (rank × inputs). Also checks that it is a safetensors file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(HEADER_BYTES_MAX, size - 8):
            raise LoraError(400, f"{WEIGHTS} is not a safetensors file")
        header = file.read(length)
    rank = 0
    try:
        for name, tensor in msgspec.json.decode(header, type=dict[str, dict[str, Any]]).items():
            if name == "__metadata__":
                continue
            _, end = tensor["data_offsets"]
            if not 0 <= end <= size - 8 - length:
                raise LoraError(400, f"{WEIGHTS} is truncated")
            if ".lora_A" in name:
                rank = max(rank, int(tensor["shape"][0]))
    except (msgspec.DecodeError, LookupError, TypeError, ValueError) as error:
        raise LoraError(400, f"{WEIGHTS} is not a safetensors file: {error}") from error
    if not rank:
        raise LoraError(400, f"{WEIGHTS} has no LoRA matrices")
    return rank


# Reading the files of a source.

REDIRECTS_MAX = 5
CONNECT_S = 10.0
"""Shared by the addresses of a host, which are tried one after the other."""
SILENCE_S = 30.0

USER_AGENT = "headwater"


class Origin:
    """One source: files below it, or an archive at it."""

    def __init__(self, source: Source, policy: LoraPolicy, budget: Budget) -> None:
        self._source = source
        self._policy = policy
        self._budget = budget

    def save(self, name: str, to: Path) -> None:
        """Write the file `name` of the adapter to `to`, which must not exist; "" is the source itself.

        Raises `SourceMissing` where there is none, `LoraError` for other errors, `EngineUnavailable` for a missing package.
        """
        raise NotImplementedError

    def names(self) -> list[str]:
        """Names of all files, where they can be listed, for error messages. Never fails."""
        return []  # a web server has no listing, and that of a bucket needs another permission than reading it


def origin(source: Source, policy: LoraPolicy, budget: Budget) -> Origin:
    """The reader of a source that `policy` admitted."""
    kinds: dict[str, type[Origin]] = {"file": FolderOrigin, "s3": BucketOrigin, "hf": HubOrigin}
    return kinds.get(source.scheme, HttpOrigin)(source, policy, budget)


class FolderOrigin(Origin):
    """A local folder, or one that all machines mount."""

    def save(self, name: str, to: Path) -> None:
        """See `Origin.save`. A link may not lead out of the allowed folders."""
        path = Path(self._source.path, name)
        # Links are resolved and checked again: the folder's files may be links themselves.
        self._policy.admit(str(path.resolve()))
        try:
            # Does not wait for a writer if it is a pipe.
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise SourceMissing(str(path)) from error
        except OSError as error:
            raise LoraError(502, f"{path}: {error.strerror}") from error
        with os.fdopen(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise LoraError(400, f"{path} is not a regular file")
            self._budget.save(chunks(file), to)

    def names(self) -> list[str]:
        """See `Origin.names`."""
        return os.listdir(self._source.path) if os.path.isdir(self._source.path) else []


class HttpOrigin(Origin):
    """A web server. A redirect must lead to an allowed source, and every host must be at an allowed address."""

    def save(self, name: str, to: Path) -> None:
        """See `Origin.save`."""
        url = self._source.text.rstrip("/") + (f"/{name}" if name else "")
        for _ in range(REDIRECTS_MAX + 1):
            onward = self._get(url, to)
            if not onward:
                return
            url = urljoin(url, onward)
            self._policy.admit(url)
        raise LoraError(502, f"{self._source.text} redirects more than {REDIRECTS_MAX} times")

    def _get(self, text: str, to: Path) -> str:
        """Save the file at this URL; returns the target of a redirect instead."""
        refused: list[str] = []
        try:
            url = _web_url(text)
            with self._connected(url, refused) as link, request_file(url, link, USER_AGENT) as response:
                if response.status in REDIRECTS and (onward := response.getheader("location")):
                    return onward
                if response.status in (404, 410):
                    raise SourceMissing(text)
                if response.status != 200:
                    raise LoraError(502, f"{text} answers {response.status} {response.reason}")
                self._budget.save(chunks(response), to)
                if response.length:
                    raise IncompleteRead(b"", response.length)
        except (OSError, HTTPException, ValueError) as error:
            if refused:
                reason = (
                    f"{refused[0]}, which is not a public address; --lora-networks allows further networks"
                )
                raise LoraError(403, f"{text} is at {reason}") from error
            raise LoraError(502, f"{text}: {error}") from error
        return ""

    def _connected(self, url: WebUrl, refused: list[str]) -> socket.socket:
        """A connection to an allowed address of the host; the others are added to `refused`."""
        addresses = resolve(url.host, url.port)
        refused += [candidate for candidate in addresses if not may_connect(candidate, self._policy.networks)]
        allowed = [candidate for candidate in addresses if candidate not in refused]

        def connect(address: str, port: int) -> socket.socket:
            connection = socket.create_connection((address, port), CONNECT_S / len(allowed))
            connection.settimeout(SILENCE_S)
            self._budget.watch(connection)
            return connection

        return connect_first(url, allowed, WebAccess(connect=connect))


def _web_url(text: str) -> WebUrl:
    """A URL that was admitted. Raises `ValueError` for a name that DNS cannot have."""
    parts = urlsplit(text)
    host = (parts.hostname or "").rstrip(".").encode("idna").decode()
    return WebUrl(parts.scheme, host, parts.port or PORTS[parts.scheme], request_target(parts.path))


class BucketOrigin(Origin):
    """Objects of an S3 bucket. Keys and endpoint come from AWS's own environment variables."""

    def save(self, name: str, to: Path) -> None:
        """See `Origin.save`."""
        obstore, stores = _package("obstore", "on S3"), _package("obstore.store", "on S3")
        key = "/".join(part for part in (self._source.path.strip("/"), name) if part)
        try:
            response = obstore.get(stores.S3Store(self._source.host), key)
            self._budget.save(response.stream(min_chunk_size=CHUNK_BYTES), to)
        except FileNotFoundError as error:
            raise SourceMissing(f"s3://{self._source.host}/{key}") from error
        except obstore.exceptions.BaseError as error:
            raise LoraError(502, f"s3://{self._source.host}/{key}: {error}") from error


class HubOrigin(Origin):
    """A repository of a Hugging Face hub. Token and endpoint come from its library's own settings."""

    def save(self, name: str, to: Path) -> None:
        """See `Origin.save`. The size is requested first, as the library reads a whole file."""
        hub = _package("huggingface_hub", "of a hub")
        errors = _package("huggingface_hub.errors", "of a hub")
        repository, revision = self._repository()
        folder = to.parent / ".hub"
        try:
            size = hub.get_hf_file_metadata(hub.hf_hub_url(repository, name, revision=revision)).size
            self._budget.spend(size or 0)
            got = hub.hf_hub_download(repository, name, revision=revision, local_dir=str(folder))
            if os.path.getsize(got) != size:
                raise LoraError(502, f"{self._source.text}: {name} does not have the announced size")
            os.rename(got, to)
        except errors.LocalEntryNotFoundError as error:
            # The library's error for an unreachable hub, which would count as a missing file below.
            raise LoraError(502, f"{self._source.text}: {error}") from error
        except errors.EntryNotFoundError as error:
            raise SourceMissing(f"{name} in {self._source.text}") from error
        except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
            raise SourceMissing(f"{self._source.text} (or it needs a token: HF_TOKEN)") from error
        except LoraError:
            raise
        except Exception as error:  # connections fail with errors of whichever HTTP client the library has
            raise LoraError(502, f"{self._source.text}: {error}") from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def names(self) -> list[str]:
        """See `Origin.names`."""
        repository, revision = self._repository()
        hub = _package("huggingface_hub", "of a hub")
        try:
            return list(hub.HfApi().list_repo_files(repository, revision=revision))
        except Exception:
            return []

    def _repository(self) -> tuple[str, str | None]:
        name, _, revision = self._source.path.partition("/@")
        return f"{self._source.host}/{name}", revision or None


def _package(name: str, where: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise EngineUnavailable(f"adapters {where} need {package}: pip install 'headwater[lora]'") from error
