"""The file of a capture: a part of the logs of one pool, with what is needed to fold it, in a zip archive.

    mimetype                     `application/vnd.headwater.capture`, stored first and not compressed
    pool/000000.msgpack …        messages of the pool's log in order: arrays of [position, subject, stored_ns, data]
    requests/000000.msgpack …    messages of the request log
    blobs/000000 …               objects: a snapshot with its chunks, and bookmarks
    metrics/000000.txt …         metrics of processes
    capture.json                 `Contents`: what the archive has, with the SHA-256 of each member
    capture.sha256               SHA-256 of capture.json, in hex

A chunk of a log is at most a few MiB, so a capture is written and read with little memory, and a reader decompresses only the
chunks that it needs. The archive is visible under its name only when it is complete.

`Redaction` removes recorded prompts and answers from the messages of the request log. A message with contents is encoded again without them.
Its digest is then another one, so the messages after it on its subject are encoded again with the digest of their new predecessor: what
remains is a valid chain. Messages that cannot be read are left out.
"""

import hashlib
import os
import zipfile
import zlib
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

import msgspec

from headwater.events.ports import LogRefused, StoredMessage
from headwater.ops.config.setting import ConfigError
from headwater.schemas.encoding import DIGEST_BYTES, LogEvent, UnreadableBatch, decode_batch, encode_batch
from headwater.schemas.events import RequestAccepted, RequestCheckpoint, RequestEnded


class Redaction:
    """Of one request log, message by message. `removed` counts events with contents, `unreadable` messages that were left out."""

    def __init__(self) -> None:
        self.removed = 0
        self.unreadable = 0
        self._digests: dict[str, bytes] = {}

    def without_contents(self, message: StoredMessage) -> StoredMessage | None:
        """The message without contents; None if it is unreadable."""
        try:
            batch = decode_batch(message.data)
        except UnreadableBatch:
            self.unreadable += 1
            return None
        events = tuple([_bare(event) for event in batch.events])
        removed = sum(new is not old for new, old in zip(events, batch.events, strict=True))
        previous = self._digests.get(message.subject)
        if not removed and previous is None:
            return message
        self.removed += removed
        changed = msgspec.structs.replace(batch, events=events, previous=previous or batch.previous)
        data = encode_batch(changed)
        self._digests[message.subject] = data[-DIGEST_BYTES:]
        return message._replace(data=data)


def _bare(event: LogEvent) -> LogEvent:
    """The event without contents. Digests of contents stay."""
    if isinstance(event, RequestAccepted) and event.payload == "full":
        return msgspec.structs.replace(event, payload="off", body=b"")
    if isinstance(event, RequestEnded) and event.payload == "full":
        return msgspec.structs.replace(event, payload="off", answers=())
    if isinstance(event, RequestCheckpoint) and event.tokens:
        return msgspec.structs.replace(event, tokens=b"")
    return event


MIMETYPE: Final = b"application/vnd.headwater.capture"
FORMAT_VERSION: Final = 1
"""Version of the format that this release writes, and the newest that it reads."""

CHUNK_MESSAGES_MAX: Final = 2_048
CHUNK_BYTES_MAX: Final = 4 * 1024 * 1024
"""A chunk is full with this many messages, or with this many bytes of them."""

LEVEL: Final = 1
"""Of compression: hashes do not compress, and the rest does at any level."""

CACHED_CHUNKS: Final = 4
_EPOCH: Final = (1980, 1, 1, 0, 0, 0)

_messages = msgspec.msgpack.Decoder(list[StoredMessage])
_encoder = msgspec.msgpack.Encoder()


class ChunkEntry(msgspec.Struct, frozen=True):
    """A chunk of a log: `count` messages, the first and last of them with their positions and times."""

    member: str
    count: int
    first: int
    last: int
    first_ns: int
    last_ns: int
    sha256: str


class LogEntry(msgspec.Struct, frozen=True):
    """A part of a log: what lies after position `after`. `identity` is that of the log."""

    identity: str
    after: int
    chunks: tuple[ChunkEntry, ...] = ()
    bytes: int = 0

    @property
    def last(self) -> int:
        """Its last position."""
        return self.chunks[-1].last if self.chunks else self.after

    @property
    def messages(self) -> int:
        """How many messages it has."""
        return sum(chunk.count for chunk in self.chunks)


class BlobEntry(msgspec.Struct, frozen=True):
    """An object of the object store."""

    name: str
    member: str
    size: int
    sha256: str


class TableValue(msgspec.Struct, frozen=True):
    """The value of a key of a table when the capture was made."""

    key: str
    value: bytes


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """What a capture has. Times are in nanoseconds since the Unix epoch.

    It is of what was stored from `begin_ns` to `end_ns`, the time `around` something, and what precedes that in the pool's log
    after `snapshot`, the position of the newest snapshot before (0: the log's start). `has_contents`: prompts and answers that were recorded were not removed.
    """

    version: int
    release: str
    schema: int
    platform: str
    server: str = ""
    made_ns: int
    namespace: str
    pool: str
    around: str
    begin_ns: int
    end_ns: int
    snapshot: int
    has_contents: bool
    pool_log: LogEntry
    request_log: LogEntry
    blobs: tuple[BlobEntry, ...] = ()
    leases: tuple[TableValue, ...] = ()
    cards: tuple[TableValue, ...] = ()
    metrics: dict[str, str] = {}
    notes: tuple[str, ...] = ()


class LogWriter:
    """Writes one log's part of a capture."""

    def __init__(self, archive: "CaptureWriter", folder: str) -> None:
        self._archive = archive
        self._folder = folder
        self._messages: list[StoredMessage] = []
        self._size = 0
        self.bytes = 0
        self.chunks: list[ChunkEntry] = []

    def add(self, messages: Sequence[StoredMessage]) -> None:
        """Add messages, in order of their positions."""
        for message in messages:
            self._messages.append(message)
            self._size += len(message.data)
            if len(self._messages) >= CHUNK_MESSAGES_MAX or self._size >= CHUNK_BYTES_MAX:
                self._flush()

    def _flush(self) -> None:
        if not self._messages:
            return
        member = f"{self._folder}/{len(self.chunks):06}.msgpack"
        data = _encoder.encode(self._messages)
        first, last = self._messages[0], self._messages[-1]
        digest = self._archive.add(member, data)
        self.chunks.append(
            ChunkEntry(
                member,
                len(self._messages),
                first.position,
                last.position,
                first.stored_ns,
                last.stored_ns,
                digest,
            )
        )
        self.bytes += self._size
        self._messages, self._size = [], 0

    def entry(self, identity: str, after: int) -> LogEntry:
        """What was written, of the log with this identity, after a position."""
        self._flush()
        return LogEntry(identity, after, tuple(self.chunks), self.bytes)


class CaptureWriter:
    """Writes a capture; `close` completes it. A block that ends without leaves no file, and an earlier one as it was."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._part = path.with_name(f".{path.name}.{os.getpid()}.part")
        self._archive = zipfile.ZipFile(self._part, "w")
        self._blobs: list[BlobEntry] = []
        self._is_complete = False
        self._write("mimetype", MIMETYPE, zipfile.ZIP_STORED)
        self.pool_log = LogWriter(self, "pool")
        self.request_log = LogWriter(self, "requests")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_complete:
            self._archive.close()
            self._part.unlink(missing_ok=True)

    def add(self, member: str, data: bytes | bytearray | memoryview) -> str:
        """Add a member; returns the SHA-256 of its bytes, in hex."""
        self._write(member, data, zipfile.ZIP_DEFLATED)
        return hashlib.sha256(data).hexdigest()

    def add_blob(self, name: str, data: bytes | bytearray | memoryview) -> str:
        """Add an object of the object store; returns its digest."""
        member = f"blobs/{len(self._blobs):06}"
        digest = self.add(member, data)
        self._blobs.append(BlobEntry(name, member, len(data), digest))
        return digest

    @property
    def blobs(self) -> tuple[BlobEntry, ...]:
        """The objects that were added."""
        return tuple(self._blobs)

    def close(self, contents: Contents) -> int:
        """Write what the archive has, and put it in its place; returns its size in bytes."""
        data = msgspec.json.format(msgspec.json.encode(contents))
        digest = self.add("capture.json", data)
        self._write("capture.sha256", digest.encode(), zipfile.ZIP_STORED)
        self._archive.close()
        self._part.replace(self._path)
        self._is_complete = True
        return self._path.stat().st_size

    def _write(self, member: str, data: bytes | bytearray | memoryview, how: int) -> None:
        info = zipfile.ZipInfo(member, _EPOCH)
        info.external_attr = 0o600 << 16
        self._archive.writestr(info, data, how, LEVEL)


class Held(NamedTuple):
    """The messages of a chunk, and their positions."""

    positions: list[int]
    messages: list[StoredMessage]


class CaptureFile:
    """An open capture. Raises `ConfigError` if the file is none, of a newer release, or damaged.

    `close` it. A member that turns out to be damaged when it is read raises `LogRefused`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._archive = zipfile.ZipFile(path)
        except OSError as error:
            raise ConfigError(f"--file {path}: {error.strerror or error}") from error
        except zipfile.BadZipFile as error:
            raise ConfigError(f"--file {path}: it is no capture, or is incomplete: {error}") from error
        try:
            self.contents = self._read_contents()
        except BaseException:
            self._archive.close()
            raise
        self._blobs = {blob.name: blob for blob in self.contents.blobs}
        self.chunk = lru_cache(CACHED_CHUNKS)(self._chunk)

    def close(self) -> None:
        """Close the file."""
        self._archive.close()

    def _read_contents(self) -> Contents:
        try:
            kind = self._archive.read("mimetype")
            data = self._archive.read("capture.json")
            digest = self._archive.read("capture.sha256").decode("ascii", "replace")
        except (KeyError, zipfile.BadZipFile, zlib.error, OSError, EOFError) as error:
            raise ConfigError(
                f"--file {self._path}: it is no capture of `headwater capture`: {error}"
            ) from error
        if kind != MIMETYPE:
            raise ConfigError(f"--file {self._path}: it is no capture but {kind[:80]!r}")
        if hashlib.sha256(data).hexdigest() != digest:
            raise ConfigError(f"--file {self._path}: it is damaged: capture.json does not match its digest")
        try:
            version = msgspec.json.decode(data, type=_Version)
            if version.version > FORMAT_VERSION:
                raise ConfigError(
                    f"--file {self._path}: Headwater {version.release} made it in format {version.version}, and this release "
                    f"reads formats up to {FORMAT_VERSION}"
                )
            return msgspec.json.decode(data, type=Contents)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"--file {self._path}: capture.json: {error}") from error

    def read(self, member: str, digest: str) -> bytes:
        """The bytes of a member. Raises `LogRefused` if they are not those that were written."""
        try:
            data = self._archive.read(member)
        except (KeyError, zipfile.BadZipFile, zlib.error, OSError, EOFError) as error:
            raise LogRefused(f"capture {self._path}: {member} is unreadable: {error}") from error
        if hashlib.sha256(data).hexdigest() != digest:
            raise LogRefused(f"capture {self._path}: {member} is damaged: its bytes do not match its digest")
        return data

    def _chunk(self, entry: ChunkEntry) -> Held:
        try:
            messages = _messages.decode(self.read(entry.member, entry.sha256))
        except msgspec.DecodeError as error:
            raise LogRefused(f"capture {self._path}: {entry.member}: {error}") from error
        return Held([message.position for message in messages], messages)

    @property
    def blob_names(self) -> list[str]:
        """Names of the objects, sorted."""
        return sorted(self._blobs)

    def blob(self, name: str) -> bytes | None:
        """An object, None where it is absent. Raises `LogRefused`."""
        entry = self._blobs.get(name)
        return None if entry is None else self.read(entry.member, entry.sha256)


class _Version(msgspec.Struct):
    version: int
    release: str = "of an unknown release"


def chunk_after(entry: LogEntry, position: int) -> int:
    """The number of the first chunk with a message after a position."""
    return bisect_left(entry.chunks, position + 1, key=lambda chunk: chunk.last)
