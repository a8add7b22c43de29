"""`headwater backup` and `headwater restore`: the streams of a namespace in a folder, and back.

What is not copied: leases, which live for seconds, and the edges' shared secrets, which no operator may read; edges make new ones, and
cached prompts of tenants are cold then.

The object store is copied before the pools' logs, so that no snapshot of a router is ahead of the log that it is of, and the request log
before them too, so that every request in it finds its decisions. Each pool's state is the fold of its log, so the copy of a running fleet
is that fleet as of the last position of each log.
"""

import contextlib
import hashlib
import os
import shutil
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from headwater import __version__
from headwater.events.chain import Chains
from headwater.events.jetstream import Connection
from headwater.events.jetstream.api import api
from headwater.events.jetstream.copies import CHUNK_BYTES, StreamCopy, restore_stream, snapshot_stream
from headwater.events.jetstream.log import JetStreamLog
from headwater.events.jetstream.stream_spec import StreamSpec
from headwater.events.jetstream.streams import stream_names, wanted_streams
from headwater.events.ports import LogError, StreamMissing
from headwater.ops.config.sections import NatsSettings
from headwater.ops.config.setting import ConfigError
from headwater.ops.nats.connect import connected
from headwater.ops.terminal import table

FORMAT: Final = 1
MANIFEST: Final = "backup.json"
PARTIAL: Final = ".partial"

LEFT_OUT: Final = frozenset({"leases", "secrets"})
ORDER: Final = (
    "objects",
    "model cards",
    "API keys",
    "stored responses",
    "video jobs",
    "request log",
    "pool log",
)


class CopiedStream(msgspec.Struct, frozen=True):
    """A stream of a backup, in `file`."""

    name: str
    what: str
    file: str
    copy: StreamCopy

    @property
    def last(self) -> int:
        """Its last position."""
        return int(self.copy.state["last_seq"])


class Manifest(msgspec.Struct, frozen=True):
    """What a backup has. Written last: a folder without it is no backup."""

    format: int
    namespace: str
    release: str
    made: str
    streams: tuple[CopiedStream, ...]


async def backup(nats: NatsSettings, out: str) -> int:
    """Copy all streams to a new folder and print them. Raises `ConfigError` and `LogError`; then the folder is not there."""
    folder = Path(out)
    if folder.exists():
        raise ConfigError(f"--out {out}: it exists; give the name of a new folder")
    unfinished = folder.with_name(folder.name + PARTIAL)
    try:
        unfinished.mkdir(parents=True)
    except FileExistsError as error:
        raise ConfigError(
            f"{unfinished}: another backup writes there, or one was interrupted: remove it"
        ) from error
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}") from error
    try:
        async with connected(nats, "operator", "backup") as client:
            streams = [await _copy(client, spec, unfinished) for spec in await _specs(client, nats.namespace)]
        created_at = datetime.now(UTC).isoformat(timespec="seconds")
        manifest = Manifest(FORMAT, nats.namespace, __version__, created_at, tuple(streams))
        (unfinished / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
        os.rename(unfinished, folder)
    finally:
        if unfinished.exists():
            shutil.rmtree(unfinished, ignore_errors=True)
    print(as_table(manifest))
    return 0


async def _specs(client: Connection, ns: str) -> list[StreamSpec]:
    """The streams that are there and belong in a backup, in the order in which they are copied."""
    specs = await wanted_streams(client, ns, 1)
    existing = set(await stream_names(client, ""))
    backed_up = [spec for spec in specs if spec.what not in LEFT_OUT and spec.name in existing]
    if not backed_up:
        raise ConfigError(f"there is nothing to back up: the server has no stream of namespace {ns}")
    return sorted(backed_up, key=lambda spec: (ORDER.index(spec.what), spec.name))


async def _copy(client: Connection, spec: StreamSpec, folder: Path) -> CopiedStream:
    name = f"{spec.name}.tar.s2"
    with (folder / name).open("wb") as file:
        copy = await snapshot_stream(client, spec.name, file.write)
        file.flush()
        os.fsync(file.fileno())
    return CopiedStream(spec.name, spec.what, name, copy)


def as_table(manifest: Manifest) -> str:
    """The streams of a backup."""
    rows = [
        (
            stream.name,
            stream.what,
            stream.copy.state["messages"],
            stream.last,
            f"{stream.copy.bytes / 1024:.0f} KiB",
        )
        for stream in manifest.streams
    ]
    head = f"namespace {manifest.namespace}, release {manifest.release}, {manifest.made}"
    return f"{head}\n{table(('stream', 'what', 'messages', 'last position', 'copy'), rows)}"


# Restoring.


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a backup, after every file was compared with its digest. Raises `ConfigError`."""
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except OSError as error:
        raise ConfigError(f"{folder}: no backup: {MANIFEST}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{folder / MANIFEST}: {error}") from error
    if manifest.format != FORMAT:
        raise ConfigError(
            f"{folder}: it has format {manifest.format}, of release {manifest.release}, and this release reads {FORMAT}"
        )
    for stream in manifest.streams:
        file = folder / stream.file
        if Path(stream.file).name != stream.file or not file.is_file():
            raise ConfigError(f"{folder}: {stream.file} is missing")
        if file.stat().st_size != stream.copy.bytes or _digest(file) != stream.copy.digest:
            raise ConfigError(f"{file}: its bytes are not those that were backed up")
    return manifest


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


async def restore(nats: NatsSettings, folder: str, *, replicas: int, check: bool) -> int:
    """Make the streams of a backup on a server that has none of them, and read the logs again. Raises `ConfigError` and `LogError`.

    With `check` only the files are verified.
    """
    place = Path(folder)
    manifest = read_manifest(place)
    if check:
        print(f"{as_table(manifest)}\nall files are as they were backed up")
        return 0
    if manifest.namespace != nats.namespace:
        raise ConfigError(
            f"{folder} is of namespace {manifest.namespace}: give --namespace {manifest.namespace}, which is part of every subject in it"
        )
    async with connected(nats, "operator", "restore") as client:
        existing = sorted(set(await stream_names(client, "")) & {stream.name for stream in manifest.streams})
        if existing:
            raise ConfigError(
                f"the server has {', '.join(existing)} already. Restore into a server without this namespace, before any process of "
                "Headwater connects to it: each creates the streams that are missing"
            )
        done: list[str] = []
        try:
            for stream in manifest.streams:
                done.append(stream.name)
                await _restore_one(client, place, stream, replicas)
        except BaseException:
            # Half a namespace is worse than none.
            for name in done:
                with contextlib.suppress(LogError):
                    await api(client, f"STREAM.DELETE.{name}")
            raise
        broken = [text for stream in manifest.streams for text in await _verify(client, stream)]
    print(as_table(manifest))
    print("\n".join(broken) or "every message is there, and every log's chain of digests is whole")
    print(
        "the logs keep messages of any age for now: `headwater streams` shows it, and `nats stream edit` sets max_age once what "
        "was restored may be cut"
    )
    return 1 if broken else 0


async def _restore_one(client: Connection, folder: Path, stream: CopiedStream, replicas: int) -> None:
    config = _as_given(stream.copy.config)
    if replicas:
        config["num_replicas"] = replicas
    if stream.what in ("pool log", "request log"):
        # What is older than its log's age would be cut at once.
        config["max_age"] = 0
    with (folder / stream.file).open("rb") as file:
        await restore_stream(client, config, stream.copy.state, iter(partial(file.read, CHUNK_BYTES), b""))


def _as_given(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration without what the server notes in it itself."""
    metadata = {
        key: value for key, value in (config.get("metadata") or {}).items() if not key.startswith("_nats.")
    }
    plain_config = {key: value for key, value in config.items() if key != "metadata"}
    return {**plain_config, "metadata": metadata} if metadata else plain_config


async def _verify(client: Connection, stream: CopiedStream) -> list[str]:
    """What is wrong with a restored stream: its number of messages, and of a log its messages and chains."""
    try:
        state = (await api(client, f"STREAM.INFO.{stream.name}"))["state"]
    except StreamMissing:
        return [f"{stream.name}: it is missing"]
    # An empty stream that never had a message numbers its first one 0, and 1 once it was restored.
    compared = ("messages", "first_seq", "last_seq") if state["messages"] else ("messages", "last_seq")
    problems = [
        f"{stream.name}: {key} is {state[key]} and was {stream.copy.state[key]}"
        for key in compared
        if state[key] != stream.copy.state[key]
    ]
    if stream.what not in ("pool log", "request log"):
        return problems
    chains = Chains(whole=int(state["first_seq"]) <= 1)
    async for piece in JetStreamLog(client, stream.name).read(0, follow=False):
        problems += [f"{stream.name}: position {bad.position}: {bad.reason}" for bad in piece.unreadable]
        for record in piece.records:
            _, broken = chains.follow(record)
            if broken is not None:
                problems.append(f"{stream.name}: position {broken.position}: {broken.reason}")
    return problems
