"""The test server itself: what the other contract tests take for granted about it."""

import asyncio
import os
import sys
from pathlib import Path

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from headwater.events.jetstream.api import api, last_message, publish
from headwater.events.jetstream.cursor import parse_ack
from tests.support.ports.logs import connected
from tests.support.ports.waiting import eventually
from tests.support.servers.nats import NatsServer

ROOT = Path(__file__).parents[3]


async def _ack_subject(client: Client, stream: str) -> str:
    """Reply subject of a message that a consumer of `stream` delivers."""
    await api(client, f"STREAM.CREATE.{stream}", {"name": stream, "subjects": [f"{stream}.x"]})
    await publish(client, f"{stream}.x", b"1", {}, 5.0)
    body = {"stream_name": stream, "config": {"name": "c", "ack_policy": "none"}, "action": ""}
    await api(client, f"CONSUMER.CREATE.{stream}.c", body)
    inbox = client.new_inbox()
    delivered: list[Msg] = []

    async def on_message(message: Msg) -> None:
        delivered.append(message)

    await client.subscribe(inbox, cb=on_message)
    await client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.c", b"1", reply=inbox)
    await eventually(lambda: bool(delivered))
    return delivered[0].reply


@pytest.mark.ack_formats
async def test_ack_flag_decides_the_format_of_ack_subjects(
    client: Client, server: NatsServer, unique: str
) -> None:
    """Both values of the flag really run both formats: 9 tokens, or 11 and more with domain and account."""
    reply = await _ack_subject(client, unique)
    tokens = reply.split(".")
    assert len(tokens) in ((11, 12) if server.ack_v2 else (9,))
    assert parse_ack(reply)[:2] == (1, 1)


async def test_killed_server_comes_back_on_its_port_with_its_store(tmp_path: Path) -> None:
    """What was acknowledged before the SIGKILL is there after the restart, for the same connection."""
    server = NatsServer(tmp_path)
    await server.start()
    try:
        url, pid = server.url, server.pid
        async with connected(server) as client:
            await api(client, "STREAM.CREATE.S", {"name": "S", "subjects": ["s.x"]})
            await publish(client, "s.x", b"1", {}, 5.0)
            server.kill()
            await server.restart()
            assert (server.url, server.pid) != (url, pid)
            assert server.url == url
            last = await last_message(client, "S", "s.x", deadline_s=30)
            assert last is not None
            assert last.data == b"1"
    finally:
        server.stop()


async def test_server_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    """A test run that is killed leaves no server behind."""
    code = (
        "import time, sys; from pathlib import Path; from tests.support.servers.nats import NatsServer;"
        "server = NatsServer(Path(sys.argv[1])); server.start_now();"
        "print(server.pid, flush=True); time.sleep(600)"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, str(tmp_path), cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert parent.stdout is not None
        pid = int(await parent.stdout.readline())
        os.kill(pid, 0)
    finally:
        parent.kill()
        await parent.communicate()
    await eventually(lambda: not Path(f"/proc/{pid}").exists())
