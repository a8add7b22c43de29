"""An edge that may open few files: it takes what it can serve, answers 503 beyond, and says so."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from headwater.ops.start.sockets import free_port
from tests.support.processes import zygote
from tests.support.servers.nats import running

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

FEW = 256
CLIENTS = 300

PROGRAM = """
import resource, sys
from headwater.ops import cli
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
raise SystemExit(cli.main(sys.argv[3:]))
"""
"""`headwater` with a soft and a hard limit of its own."""


async def answer(port: int) -> tuple[bytes, asyncio.StreamWriter]:
    """The first line that a connection gets for a request, and the connection, which stays open."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
    with contextlib.suppress(ConnectionError):
        await writer.drain()
        return await reader.readline(), writer
    return b"", writer


@pytest.mark.parametrize("hard", [FEW, 4096])
async def test_more_clients_than_descriptors_are_answered(tmp_path: Path, hard: int) -> None:
    """The soft limit is raised to the hard one. Where that is too low, 503: no connection is closed without a word."""
    port = free_port(0)
    async with running(tmp_path) as server:
        process = await zygote.start(
            *("-c", PROGRAM, str(FEW), str(hard), "edge"),
            *("--nats", server.url, "--port", str(port), "--log-format", "json"),
            *("--http-limits", "connections_max=2000"),
            stdout=zygote.PIPE,
            stderr=zygote.STDOUT,
        )
        open_: list[asyncio.StreamWriter] = []
        try:
            async with asyncio.timeout(60):
                while True:
                    with contextlib.suppress(OSError):
                        _, writer = await asyncio.open_connection("127.0.0.1", port)
                        writer.close()
                        break
                    await asyncio.sleep(0.05)
                lines = []
                for _ in range(CLIENTS):
                    line, writer = await answer(port)
                    lines.append(line)
                    open_.append(writer)
            silent = [number for number, line in enumerate(lines) if not line]
            assert not silent, f"{len(silent)} of {CLIENTS} connections were closed without an answer"
            served = sum(b" 200 " in line for line in lines)
            refused = sum(b" 503 " in line for line in lines)
            assert served + refused == CLIENTS
            assert bool(refused) == (hard == FEW)
            assert served >= FEW // 2
        finally:
            for writer in open_:
                writer.close()
            process.terminate()
            output, _ = await process.communicate()
        assert ("descriptors" in output.decode()) == (hard == FEW), output.decode()[-2000:]
