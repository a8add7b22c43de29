"""When the embedded nats-server is started again: what its health check says, in the server's own words."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from headwater.ops.nats import connect
from headwater.ops.nats.connect import frozen_streams, watch_store

WRITE_ERROR = {
    "type": "STREAM",
    "account": "$G",
    "stream": "HW_REQ",
    "error": "write error: no space left on device",
}
DISABLED = {"type": "JETSTREAM", "error": "JetStream not enabled (10076)"}
STARTING = {"type": "CONNECTION", "error": "failed to be ready for connections after 1ms: server"}
RECOVERING = {
    "type": "STREAM",
    "account": "$G",
    "stream": "HW_REQ",
    "error": "JetStream stream is not current",
}


class HealthCheck:
    """A monitoring port that answers with `errors`, or accepts requests and never answers while this is None."""

    def __init__(self, *errors: dict[str, str]) -> None:
        self.errors: tuple[dict[str, str], ...] | None = errors
        self.unanswered = asyncio.Event()

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[int]:
        """The port."""

        async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            if self.errors is None:
                self.unanswered.set()
                await reader.read()
            else:
                document = {"status": "error", "errors": self.errors} if self.errors else {"status": "ok"}
                writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + msgspec.json.encode(document))
            writer.close()

        server = await asyncio.start_server(respond, "127.0.0.1", 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()


@pytest.mark.parametrize(
    ("errors", "streams"),
    [((), []), ((WRITE_ERROR, RECOVERING), ["HW_REQ"]), ((DISABLED,), ["every stream"]), ((STARTING,), [])],
)
async def test_streams_that_take_no_writes(errors: tuple[dict[str, str], ...], streams: list[str]) -> None:
    """Those of a store that met a write error, or all; none of a server that still starts."""
    async with HealthCheck(*errors).serve() as port:
        found = await frozen_streams(port)
        assert found is not None
        assert sorted(found) == streams


@contextlib.asynccontextmanager
async def watching(check: HealthCheck, store: Path) -> AsyncIterator[asyncio.Event]:
    """A server is watched within the block; yields what is set when it is restarted."""
    restarted = asyncio.Event()

    async def restart() -> None:
        restarted.set()

    async with check.serve() as port, asyncio.timeout(10):
        task = asyncio.create_task(watch_store(port, store, restart))
        try:
            yield restarted
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_a_server_whose_health_check_blocks_after_a_write_error_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No answer is no recovery; before any write error it is no reason for a restart either."""
    monkeypatch.setattr(connect, "LOOK_S", 0.01)
    monkeypatch.setattr(connect, "ANSWER_S", 0.05)
    looks = 0
    full = "no space left on device"

    def no_room(folder: Path) -> str:
        nonlocal looks, full
        looks += 1
        return full

    monkeypatch.setattr(connect, "why_no_room", no_room)
    check = HealthCheck()
    check.errors = None
    async with watching(check, tmp_path) as restarted:
        for _ in range(3):
            check.unanswered.clear()
            await check.unanswered.wait()
        assert looks == 0
        check.errors = (WRITE_ERROR,)
        while not looks:
            await asyncio.sleep(0.001)
        check.errors = None
        check.unanswered.clear()
        await check.unanswered.wait()
        assert not restarted.is_set()
        full = ""
        await restarted.wait()


async def test_a_server_that_disabled_jetstream_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else enables it."""
    monkeypatch.setattr(connect, "LOOK_S", 0.01)
    async with watching(HealthCheck(DISABLED), tmp_path) as restarted:
        await restarted.wait()
