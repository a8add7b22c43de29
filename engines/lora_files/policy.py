"""Allowed sources of LoRA adapters.

An adapter's weights generate answers for the fleet's users, and fetching one makes a worker access an address named by a
client. So only listed sources are allowed: folders, hosts, organisations of a hub.
"""

from collections.abc import Sequence
from ipaddress import ip_network
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from headwater.engines.lora_files.errors import LoraError
from headwater.engines.lora_limits import LORA_CACHE_MIB, LORA_FETCH_S, LORA_MIB
from headwater.engines.public_address import Network
from headwater.schemas.addresses import host_port

SCHEMES = ("file", "http", "https", "s3", "hf")
PORTS = {"http": 80, "https": 443}
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
        mine, wanted = _segments(self.path), _segments(prefix.path)
        return mine[: len(wanted)] == wanted


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
        raise _bad(text, f"use a folder or {', '.join(f'{one}://' for one in SCHEMES)}")
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
        or any(one in (".", "..") for one in revision.split("/"))
    ):
        raise _bad(text, "write hf://organisation/name or hf://organisation/name@revision")
    return Source("hf", organisation, repository + (f"/@{revision}" if revision else ""), text)


def _segments(path: str) -> list[str]:
    return [part for part in path.split("/") if part]


def _bad(text: str, why: str) -> LoraError:
    return LoraError(400, f"source {text} is not valid: {why}")
