"""The file of a capture: it holds what the log held, at the same positions, and a damaged one is refused."""

import json
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from headwater.events.memory import MemoryLog
from headwater.events.ports import Entry, Log, LogRefused, Slice, StoredMessage
from headwater.events.snapshot_store import SnapshotStore
from headwater.ops.config.setting import ConfigError
from headwater.ops.nats import capture_file
from headwater.ops.nats.capture_file import (
    FORMAT_VERSION,
    CaptureFile,
    CaptureWriter,
    Contents,
    LogEntry,
    Redaction,
    TableValue,
)
from headwater.ops.nats.capture_ports import GONE, NOT_CAPTURED, CapturedLog, capture_ports
from headwater.ops.operator.capture import WrittenBlobs
from headwater.router.state import RouterState
from headwater.schemas.encoding import SCHEMA_VERSION, Batch, decode_batch, seal
from headwater.schemas.events import RequestAccepted, RequestCheckpoint, RequestEnded
from tests.bench.large_log import POOL, MadeUpFleet
from tests.support.worlds.clock import ManualClock

FIRST, LAST = 101, 900
HOLES = (300, 301, 777)
STEP_NS = 250_000_000


class Case(NamedTuple):
    """A log, and a capture of a part of it in which some positions are missing."""

    whole: MemoryLog
    path: Path
    messages: list[StoredMessage]


def contents(**fields: Any) -> Contents:
    """Contents of an otherwise empty capture."""
    empty = LogEntry("life 1", 0)
    values: dict[str, Any] = {
        "version": FORMAT_VERSION,
        "release": "0.1.0",
        "schema": SCHEMA_VERSION,
        "platform": "test",
        "made_ns": 1,
        "namespace": "ns",
        "pool": POOL,
        "around": "x",
        "begin_ns": 0,
        "end_ns": 1,
        "snapshot": 0,
        "has_contents": False,
        "pool_log": empty,
        "request_log": empty,
    }
    return Contents(**values | fields)


@pytest.fixture
async def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    """800 messages in chunks of 64."""
    monkeypatch.setattr(capture_file, "CHUNK_MESSAGES_MAX", 64)
    clock = ManualClock()
    log = MemoryLog(clock)
    for message in MadeUpFleet("ns", clock).messages():
        if ".pool." not in message.subject:
            continue
        await log.append(Entry(message.subject, message.sealed))
        clock.now_s += STEP_NS / 1e9
        if (await log.bounds()).last == LAST + 50:
            break
    path = tmp_path / "a.hwc"
    kept = [
        message
        async for run in log.scan_raw(FIRST - 1, LAST)
        for message in run
        if message.position not in HOLES
    ]
    with CaptureWriter(path) as writer:
        writer.pool_log.add(kept)
        writer.add_blob("a/b", b"blob")
        entry = writer.pool_log.entry("life 1", FIRST - 1)
        assert len(entry.chunks) == 13
        writer.close(contents(pool_log=entry, blobs=writer.blobs, leases=(TableValue("worker.w1", b"{}"),)))
    return Case(log, path, kept)


async def scanned(log: Log, after: int, until: int, subjects: tuple[str, ...] = ()) -> list[Any]:
    """A scan, decoded and raw."""
    pieces = [piece async for piece in log.scan(after, until, subjects)]
    raw = [message async for run in log.scan_raw(after, until, subjects) for message in run]
    records = [record for piece in pieces for record in piece.records]
    assert not pieces or pieces[-1].lag == 0 or until < LAST
    assert [(one.position, one.stored_ns) for one in raw] == [
        (one.position, one.stored_ns) for one in records
    ]
    return [record for record in records if FIRST <= record.position <= LAST and record.position not in HOLES]


async def test_a_captured_log_reads_as_the_log_did(case: Case) -> None:
    """Scans of subjects, positions of times, bounds, the newest messages."""
    async with capture_ports(case.path) as ports:
        log = await ports.pool_log(POOL)
        assert await log.bounds() == (FIRST, LAST)
        assert await log.identity() == "life 1"
        for after, until, subjects in (
            (0, 10_000, ()),
            (FIRST + 3, FIRST + 4, ()),
            (250, 333, ("hw.ns.pool.p.load.*",)),
            (0, LAST, ("hw.*.pool.*.route.*", "hw.*.pool.*.kv.w1")),
            (LAST, LAST + 5, ()),
        ):
            assert await scanned(log, after, until, subjects) == await scanned(
                case.whole, after, until, subjects
            )
        first_ns = case.messages[0].stored_ns
        assert await log.position_at(first_ns - 1) == FIRST - 1
        for message in (*case.messages[:3], case.messages[400], case.messages[-1]):
            assert await log.position_at(message.stored_ns) == message.position
            assert await log.position_at(message.stored_ns + STEP_NS // 2) == message.position
        last = case.messages[-1]
        newest = await log.newest(last.subject)
        assert (newest.position, newest.digest) == (last.position, decode_batch(last.data).digest)
        assert (await log.newest("hw.ns.pool.p.kv.none")).position == 0
        assert (await log.retention(0)).last == LAST


async def test_reading_tells_what_is_missing(case: Case) -> None:
    """Before the capture, in it, and after its end; `lag` counts what is left."""
    async with capture_ports(case.path) as ports:
        log = await ports.pool_log(POOL)
        pieces: list[Slice] = [piece async for piece in log.read(0, follow=False)]
        assert [piece.gap for piece in pieces if piece.gap is not None] == [
            (1, FIRST - 1, NOT_CAPTURED),
            (300, 301, GONE),
            (777, 777, GONE),
        ]
        left = len(case.messages)
        for piece in pieces:
            left -= len(piece.records)
            assert piece.lag == left
        assert left == 0
        assert [record.position for piece in pieces for record in piece.records] == [
            message.position for message in case.messages
        ]
        [beyond] = [piece async for piece in log.read(LAST + 7, follow=False)]
        assert (beyond.gap, beyond.lag) == (
            (LAST + 1, LAST + 7, "the capture ends before the requested position"),
            0,
        )
        [end] = [piece async for piece in log.read(LAST, follow=False)]
        assert end == Slice([], 0)
        tail = [piece async for piece in log.read(LAST - 2, follow=False)]
        assert [record.position for piece in tail for record in piece.records] == [LAST - 1, LAST]


async def test_the_rest_of_the_ports_is_there_and_nothing_can_be_written(case: Case) -> None:
    """Objects, leases, the pool's name; another pool is not there."""
    async with capture_ports(case.path) as ports:
        log = await ports.pool_log(POOL)
        assert await ports.blobs.get("a/b") == b"blob"
        assert await ports.blobs.names("a/") == ["a/b"]
        assert await ports.blobs.has("a/b")
        assert not await ports.blobs.has("b")
        entry = await ports.leases.get("worker.w1")
        assert entry is not None
        assert entry.value == b"{}"
        assert ports.pool_logs is not None
        assert await ports.pool_logs() == [POOL]
        sealed = seal(decode_batch(case.messages[0].data))
        for write in (
            log.append(Entry("x", sealed)),
            log.ingest("x", sealed, fence="y"),
            ports.blobs.put("c", b""),
            ports.blobs.delete("a/b"),
        ):
            with pytest.raises(LogRefused, match="read-only"):
                await write
        with pytest.raises(Exception, match="has no log of pool q"):
            await ports.pool_log("q")


def changed(path: Path, member: str, data: bytes) -> Path:
    """A copy of a capture with another member in place of one."""
    copy = path.with_name(f"{member.replace('/', '-')}.hwc")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(copy, "w") as new:
        for name in old.namelist():
            new.writestr(name, data if name == member else old.read(name))
    return copy


async def test_what_is_no_capture_or_is_damaged_is_refused(case: Case, tmp_path: Path) -> None:
    """With what is wrong; a damaged part of a log when it is read."""
    with pytest.raises(ConfigError, match="No such file"):
        CaptureFile(tmp_path / "none.hwc")
    other = tmp_path / "other"
    other.write_bytes(b"other")
    with pytest.raises(ConfigError, match="it is no capture, or is incomplete"):
        CaptureFile(other)
    cut = tmp_path / "cut.hwc"
    cut.write_bytes(case.path.read_bytes()[:-500])
    with pytest.raises(ConfigError, match="it is no capture, or is incomplete"):
        CaptureFile(cut)
    with pytest.raises(ConfigError, match="it is no capture but b'application/epub"):
        CaptureFile(changed(case.path, "mimetype", b"application/epub+zip"))
    with pytest.raises(ConfigError, match="does not match its digest"):
        CaptureFile(changed(case.path, "capture.json", b"{}"))
    path = changed(case.path, "pool/000002.msgpack", b"\x90")
    log = CapturedLog(file := CaptureFile(path), file.contents.pool_log)
    assert [piece async for piece in log.scan(FIRST, FIRST + 5)]
    with pytest.raises(LogRefused, match=r"pool/000002\.msgpack is damaged"):
        [piece async for piece in log.read(FIRST - 1, follow=False)]
    file.close()


async def test_a_newer_format_is_refused_by_name(tmp_path: Path) -> None:
    """Whatever else that release has changed."""
    path = tmp_path / "new.hwc"
    with CaptureWriter(path) as writer:
        writer.close(contents(version=FORMAT_VERSION + 1, release="9.1"))
    with pytest.raises(ConfigError, match=r"Headwater 9\.1 made it in format 2, and this release reads"):
        CaptureFile(path)


def test_a_capture_that_fails_leaves_no_file(tmp_path: Path) -> None:
    """And what was there before is as it was."""
    path = tmp_path / "a.hwc"
    path.write_bytes(b"before")

    def fail() -> None:
        with CaptureWriter(path) as writer:
            writer.add_blob("a", b"a")
            raise RuntimeError("oops")

    with pytest.raises(RuntimeError, match="oops"):
        fail()
    assert [one.name for one in tmp_path.iterdir()] == ["a.hwc"]
    assert path.read_bytes() == b"before"


async def test_a_snapshot_in_a_capture_is_restored(tmp_path: Path) -> None:
    """By whoever restores those of a store."""
    fleet, path = MadeUpFleet("ns", ManualClock()), tmp_path / "a.hwc"
    for number, _ in enumerate(fleet.messages()):
        if number == 400:
            break
    with CaptureWriter(path) as writer:
        await SnapshotStore(WrittenBlobs(writer), POOL).save(fleet.state.snapshot())
        writer.close(contents(blobs=writer.blobs))
    async with capture_ports(path) as ports:
        snapshot = await SnapshotStore(ports.blobs, POOL).newest(lambda _: True)
        assert snapshot is not None
        assert RouterState.restore(snapshot).digest() == fleet.state.digest()


def request_log() -> list[StoredMessage]:
    """A chain of three messages, the second with contents."""
    events = (
        RequestAccepted("r", "m", "chat", 5, 9, True, payload="hashed", body=b"digest"),
        RequestAccepted("s", "m", "chat", 5, 9, True, payload="full", body=b"secret prompt"),
        RequestEnded("s", "stop", 1, 0, 0, 1.0, 2.0, payload="full", answers=(b"secret answer",)),
        RequestCheckpoint("s", 0, 64, b"secret tokens"),
    )
    found: list[StoredMessage] = []
    previous = bytes(8)
    for seq, some in enumerate((events[:1], events[1:], events[:1]), 1):
        sealed = seal(Batch(SCHEMA_VERSION, "e", 1, seq, 7, some, previous=previous))
        previous = sealed.digest
        found.append(StoredMessage(seq, "hw.ns.req.e", 1_000 + seq, sealed.data))
    return found


def test_contents_are_removed_and_the_chain_stays_whole() -> None:
    """Digests of contents stay; unreadable messages are left out."""
    redaction = Redaction()
    before = request_log()
    after = [redaction.without_contents(message) for message in before]
    assert redaction.without_contents(before[0]._replace(data=b"junk")) is None
    assert (redaction.removed, redaction.unreadable) == (3, 1)
    assert after[0] == before[0]
    batches = [decode_batch(message.data) for message in after if message is not None]
    assert [batch.previous for batch in batches[1:]] == [batch.digest for batch in batches[:-1]]
    assert all(b"secret" not in message.data for message in after if message is not None)
    accepted, ended, checkpoint = batches[1].events
    assert accepted == RequestAccepted("s", "m", "chat", 5, 9, True)
    assert (ended.payload, ended.answers, checkpoint.emitted_tokens) == ("off", (), 64)  # type: ignore[union-attr]


def test_the_list_of_contents_can_be_read_without_this_program(case: Case) -> None:
    """It is JSON in a zip archive whose first member says what it is."""
    with zipfile.ZipFile(case.path) as archive:
        assert archive.namelist()[0] == "mimetype"
        assert json.loads(archive.read("capture.json"))["pool"] == POOL
    assert case.path.read_bytes()[30:].startswith(b"mimetypeapplication/vnd.headwater.capture")
