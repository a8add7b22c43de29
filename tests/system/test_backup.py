"""Backups of real streams: what is restored is what was copied, position by position; what cannot be restored is named."""

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from headwater.events.jetstream.api import api
from headwater.events.jetstream.copies import restore_stream
from headwater.events.ports import Entry, Log, Record
from headwater.ops.config.sections import NatsSettings
from headwater.ops.config.setting import ConfigError
from headwater.ops.nats.connect import connected, ports_of
from headwater.ops.operator import backup as operator
from headwater.schemas import subjects
from headwater.schemas.encoding import SCHEMA_VERSION, Batch, seal
from headwater.schemas.events import KvGap
from tests.support.servers.nats import NatsServer

pytestmark = [pytest.mark.processes]

SUBJECT = subjects.pool_subject("default", "p-b16", "kv", "w1")


async def append(log: Log, count: int, *, from_seq: int = 1, previous: bytes = bytes(8)) -> bytes:
    """Append messages of one writer; returns the digest of the last one."""
    for number in range(from_seq, from_seq + count):
        sealed = seal(Batch(SCHEMA_VERSION, "w1", 1, number, 7, (KvGap(number),), previous=previous))
        await log.append(Entry(SUBJECT, sealed))
        previous = sealed.digest
    return previous


async def read(log: Log) -> list[Record]:
    """Every message."""
    return [record async for piece in log.read(0, follow=False) for record in piece.records]


@pytest_asyncio.fixture
async def second(tmp_path: Path) -> AsyncIterator[NatsSettings]:
    """An empty server."""
    server = NatsServer(tmp_path / "second")
    await server.start()
    yield NatsSettings(url=server.url)
    server.stop()


async def copied(folder: Path, messages: int = 300) -> list[Record]:
    """A backup in `folder / "copy"` of a server that is gone, whose log begins at position 101; returns that log's messages."""
    server = NatsServer(folder / "first")
    await server.start()
    try:
        nats = NatsSettings(url=server.url)
        async with ports_of(nats, "operator", "test") as ports:
            log = await ports.pool_log("p-b16")
            await append(log, messages)
            await ports.blobs.put("some/object", b"x" * 700_000)
            async with connected(nats, "operator", "test") as client:
                await api(client, f"STREAM.PURGE.{subjects.pool_stream('default', 'p-b16')}", {"seq": 101})
            found = await read(log)
        assert await operator.backup(nats, str(folder / "copy")) == 0
        return found
    finally:
        server.stop()


async def test_what_is_restored_is_what_was_copied(tmp_path: Path, second: NatsSettings) -> None:
    """Positions, times, objects; the log goes on from there. A second time it is refused, and nothing is touched."""
    before = await copied(tmp_path)
    assert (before[0].position, before[-1].position, len(before)) == (101, 300, 200)
    folder = str(tmp_path / "copy")
    with pytest.raises(ConfigError, match="is of namespace default: give --namespace default"):
        await operator.restore(second._replace(namespace="other"), folder, replicas=0, check=False)
    assert await operator.restore(second, folder, replicas=1, check=False) == 0
    with pytest.raises(ConfigError, match=r"the server has HW_default_POOL_p-b16, .* already"):
        await operator.restore(second, folder, replicas=0, check=False)
    async with ports_of(second, "operator", "test") as ports:
        log = await ports.pool_log("p-b16")
        assert await read(log) == before
        assert await ports.blobs.get("some/object") == b"x" * 700_000
        await append(log, 1, from_seq=301, previous=before[-1].batch.digest)
        assert (await read(log))[-1].position == 301


async def test_a_copy_that_was_altered_is_not_restored(
    tmp_path: Path, second: NatsSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    """A byte, a missing file, an interrupted backup, a format of a later release: each is named, and the server stays empty."""
    await copied(tmp_path, 150)
    folder = tmp_path / "copy"
    assert await operator.restore(second, str(folder), replicas=0, check=True) == 0
    assert "all files are as they were backed up" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="it exists; give the name of a new folder"):
        await operator.backup(second, str(folder))
    with pytest.raises(ConfigError, match="there is nothing to back up"):
        await operator.backup(second, str(tmp_path / "empty"))
    assert not list(tmp_path.glob("empty*"))
    file = folder / "HW_default_POOL_p-b16.tar.s2"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    await refused(second, folder, "its bytes are not those that were backed up")
    file.unlink()
    await refused(second, folder, "HW_default_POOL_p-b16.tar.s2 is missing")
    file.write_bytes(whole)
    manifest = folder / operator.MANIFEST
    text = manifest.read_bytes()
    later = msgspec.json.decode(text) | {"format": 9, "release": "9.0"}
    manifest.write_bytes(msgspec.json.encode(later))
    await refused(second, folder, "it has format 9, of release 9.0, and this release reads 1")
    manifest.unlink()
    await refused(second, folder, "no backup: backup.json")


async def refused(nats: NatsSettings, folder: Path, reason: str) -> None:
    """A restore fails before it changes anything."""
    with pytest.raises(ConfigError, match=reason):
        await operator.restore(nats, str(folder), replicas=0, check=False)
    async with connected(nats, "operator", "test") as client:
        assert (await api(client, "STREAM.NAMES"))["total"] == 0


async def test_a_server_that_takes_only_a_part_keeps_nothing(
    tmp_path: Path, second: NatsSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a namespace is worse than none: what was restored before the failure is removed again."""
    await copied(tmp_path, 150)
    real, done = restore_stream, []

    async def fails_late(client: object, config: dict[str, object], *rest: object) -> None:
        if config["name"] == "HW_default_REQ":
            raise ConfigError("the disk is full")
        done.append(config["name"])
        await real(client, config, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr("headwater.ops.operator.backup.restore_stream", fails_late)
    await refused(second, tmp_path / "copy", "the disk is full")
    assert len(done) >= 3
