"""A server that other people set up: small messages, a small store. What cannot work is an error at once, and names the setting."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from headwater.events.jetstream import connect
from headwater.events.ports import Entry, LogError, LogRefused, Stored
from headwater.ops.nats.server import open_ports
from headwater.schemas import subjects
from headwater.schemas.encoding import SCHEMA_VERSION, Batch, seal
from headwater.schemas.events import BlocksStored
from tests.support.ports.logs import POOL, append_one, batch, jetstream_case
from tests.support.processes.commands import ended
from tests.support.servers.nats import NatsServer, running

MIB = 1024 * 1024


@pytest.fixture
async def small(tmp_path: Path) -> AsyncIterator[NatsServer]:
    """A server that takes messages of 64 KiB."""
    server = NatsServer(tmp_path, settings={"max_payload": 65_536})
    await server.start()
    yield server
    server.stop()


@pytest.mark.parametrize("large", [0, 1])
@pytest.mark.parametrize("how", ["append", "ingest"])
async def test_a_batch_of_several_messages_with_one_too_large_is_refused(
    small: NatsServer, unique: str, how: str, large: int
) -> None:
    """Wherever it stands among them: it can never be stored, and trying again would take for ever."""
    async with jetstream_case(small, unique) as case:
        sizes = [200_000 if number == large else 10 for number in range(2)]
        sealed = [
            seal(Batch(SCHEMA_VERSION, "w0", 1, number, 0, (BlocksStored(0, bytes(size)),)))
            for number, size in enumerate(sizes, 1)
        ]
        fence = subjects.pool_subject(unique, POOL, "fleet", "w0")
        appending = (
            case.log.append(*(Entry(case.subject, one) for one in sealed), deadline_s=3.0)
            if how == "append"
            else case.log.ingest(case.subject, *sealed, fence=fence, deadline_s=3.0)
        )
        with pytest.raises(LogRefused, match="max_payload"):
            await appending
        assert await append_one(case.log, case.subject, batch(1)) == Stored(1)


@pytest.mark.parametrize(("max_payload", "told"), [(65_536, True), (MIB, True), (8 * MIB, False)])
async def test_a_start_tells_of_a_server_that_takes_small_messages_only(
    tmp_path: Path, unique: str, max_payload: int, told: bool
) -> None:
    """Once, with the limit and the line to change in the server's configuration."""
    async with running(tmp_path, max_payload=max_payload) as server:
        with capture_logs() as logs:
            try:
                async with open_ports(server.url, unique, "me"):
                    pass
            except LogError as error:
                logs.append({"event": str(error), "log_level": "error"})
    about = [one for one in logs if "max_payload" in str(one)]
    assert len(about) == told
    assert all(str(max_payload) in str(one) for one in about)


async def test_a_store_too_small_for_the_streams_names_the_settings(tmp_path: Path) -> None:
    """One line: the stream, what it reserves, and the flags with which it reserves less; with them it starts."""
    jetstream = {"store_dir": str(tmp_path / "js"), "max_file_store": 1024 * MIB}
    async with running(tmp_path, jetstream=jetstream) as server:
        line = (await ended("pools", "--nats", server.url)).told()
        assert "--stream-sizes" in line
        assert "2147483648" in line or "2 GiB" in line
        sizes = ["--stream-sizes", "requests=200000000,stored=100000000,pool=300000000"]
        done = await ended("pools", "--nats", server.url, *sizes)
        assert done.code == 0, done.output


async def test_connect_keeps_working_beside(small: NatsServer) -> None:
    """A small limit alone does not keep a client from connecting."""
    client = await connect(small.url, "me")
    await client.close()
