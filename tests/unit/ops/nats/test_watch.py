"""When the embedded nats-server is started again: what its health check says, in the server's own words."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from headwater.ops.nats import watch
from headwater.ops.nats.watch import frozen_streams, watch_store

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


@contextlib.asynccontextmanager
async def monitoring(*errors: dict[str, str]) -> AsyncIterator[int]:
    """A monitoring port whose health check has these errors."""

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        document = {"status": "error", "errors": list(errors)} if errors else {"status": "ok"}
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + msgspec.json.encode(document))
        writer.close()

    server = await asyncio.start_server(respond, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


@pytest.mark.parametrize(
    ("errors", "streams"),
    [
        ((), []),
        ((WRITE_ERROR, RECOVERING), ["HW_REQ"]),
        ((DISABLED,), ["every stream"]),
        ((STARTING,), []),
    ],
)
async def test_streams_that_take_no_writes(errors: tuple[dict[str, str], ...], streams: list[str]) -> None:
    """Those of a store that met a write error, or all; none of a server that still starts."""
    async with monitoring(*errors) as port:
        assert sorted(await frozen_streams(port)) == streams


async def test_a_server_that_disabled_jetstream_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else enables it."""
    monkeypatch.setattr(watch, "LOOK_S", 0.01)
    restarted = asyncio.Event()

    async def restart() -> None:
        restarted.set()

    async with monitoring(DISABLED) as port:
        watching = asyncio.create_task(watch_store(port, tmp_path, restart))
        try:
            await asyncio.wait_for(restarted.wait(), 10)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
