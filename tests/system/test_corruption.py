"""A log that was damaged behind everybody's back: a message taken out, a byte flipped on the disk, the stream replaced.

The router is stopped meanwhile and its snapshots are gone, so the next one has nothing but the damaged log.
"""

import asyncio
import base64
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from nats.aio.client import Client

from headwater.actors.runtime.tables import CardTable
from headwater.events.jetstream import connect
from headwater.events.jetstream.api import api
from headwater.events.jetstream.streams import ensure_pool
from headwater.ops.nats.server import open_ports
from headwater.schemas.events import BlocksStored
from headwater.schemas.subjects import pool_kind, pool_stream
from tests.support.processes.fleet import FleetProcess, descendants, fleet, stream_text

pytestmark = [pytest.mark.processes]

NS = "default"
RESYNC_S_MAX = 10.0
PROMPTS = [f"Tell me about river number {number}, at length and in detail. " * 6 for number in range(6)]


async def answers(up: FleetProcess) -> list[str]:
    """What the fleet answers to the same requests as ever."""
    async with up.client() as client:
        got = []
        for seed, prompt in enumerate(PROMPTS):
            body: dict[str, Any] = {
                "model": "sim",
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": 40,
                "ignore_eos": True,
                "seed": seed,
            }
            text, finish, _ = await stream_text(client, body)
            assert finish == "length"
            got.append(text)
        return got


async def settled_blocks(up: FleetProcess) -> int:
    """Blocks in the router's index once they do not change any more."""
    before = -1
    while (now := await up.blocks()) != before:
        before = now
    return now


class Damage:
    """The means to hurt one fleet's pool log, and what must be as before: its `expected` answers, its `blocks`."""

    def __init__(
        self, up: FleetProcess, client: Client, folder: Path, pool: str, expected: list[str], blocks: int
    ) -> None:
        self.expected = expected
        self.blocks = blocks
        self.told: list[dict[str, Any]] = []
        self.up = up
        self.client = client
        self.folder = folder
        self.pool = pool
        self.stream = pool_stream(NS, pool)

    async def some_kv(self) -> tuple[int, bytes]:
        """Position and bytes of the last message but one with blocks: what is announced behind it is not enough."""
        found: list[int] = []
        async with open_ports(self.up.nats, NS, "test") as world:
            log = await world.pool_log(self.pool)
            async for piece in log.read(0, follow=False):
                for one in piece.records:
                    blocks = any(isinstance(event, BlocksStored) for event in one.batch.events)
                    found += [one.position] if pool_kind(one.subject) == "kv" and blocks else []
        position = found[-2]
        answer = await api(self.client, f"STREAM.MSG.GET.{self.stream}", {"seq": position})
        return position, base64.b64decode(answer["message"]["data"])

    async def forget_snapshots(self) -> None:
        """In the object store and in the router's cache."""
        async with open_ports(self.up.nats, NS, "test") as world:
            for name in await world.blobs.names("snapshot"):
                await world.blobs.delete(name)
        shutil.rmtree(self.folder / "data" / "cache", ignore_errors=True)

    async def flip_on_disk(self, data: bytes) -> None:
        """Stop the server in an orderly way, flip one bit in the middle of these bytes, let it be started again."""
        [server] = self.up.pids("nats-server -c")
        supervisor = self.up.process.pid
        os.kill(supervisor, signal.SIGSTOP)
        try:
            os.kill(server, signal.SIGTERM)
            async with asyncio.timeout(30):
                while server in descendants(supervisor):
                    await asyncio.sleep(0.02)
            for block in (self.folder / "data" / "nats").rglob(f"{self.stream}/msgs/*.blk"):
                content = bytearray(block.read_bytes())
                at = content.find(data)
                if at >= 0:
                    content[at + len(data) // 2] ^= 1
                    block.write_bytes(content)
                    return
            raise AssertionError("the message is in no block file")
        finally:
            os.kill(supervisor, signal.SIGCONT)

    @asynccontextmanager
    async def done(self) -> AsyncIterator[None]:
        """In the block the router stands still and the log may be damaged; behind it all must be as before."""
        up = self.up
        [router] = up.pids(" router ")
        os.kill(router, signal.SIGSTOP)
        mark = up.log.stat().st_size
        yield
        os.kill(router, signal.SIGKILL)
        await up.until("another router", lambda stats: bool(_router(stats)))
        began = time.monotonic()
        await up.until("everything known again", self._whole)
        assert time.monotonic() - began < RESYNC_S_MAX
        assert await answers(up) == self.expected
        await up.until("the same blocks, and nobody in doubt", self._whole)
        # The last line may still be being written.
        lines = up.log.read_bytes()[mark:].rpartition(b"\n")[0].splitlines()
        self.told = [msgspec.json.decode(line) for line in lines if line.startswith(b"{")]

    def _whole(self, stats: list[dict[str, Any]]) -> bool:
        told = _router(stats)
        wanted = {"state": "ready", "cold": 0, "workers": 2, "blocks": self.blocks}
        return {name: told.get(name) for name in wanted} == wanted

    def named(self, position: int) -> bool:
        """Did the router's log name this position as gone, unreadable or broken behind?"""
        return any(
            (one["event"] == "log_gap" and one["first"] <= position <= one["last"])
            or (one["event"] == "log_message_unreadable" and one["log_position"] == position)
            or (one["event"] == "log_chain_broken" and f"position {position}" in one["reason"])
            for one in self.told
        )


def _router(stats: list[dict[str, Any]]) -> dict[str, Any]:
    return next((one for one in stats if one["name"] == "headwater-router"), {})


async def test_a_damaged_log_costs_no_answer_and_is_told(tmp_path: Path) -> None:
    """A message deleted, a bit flipped between two lives of the server, the stream deleted and made anew.

    One fleet for all three, since starting one is most of the time. The last log is replayed when it ends.
    """
    async with fleet(tmp_path, "--engine", "sim") as up:
        expected = await answers(up)
        blocks = await settled_blocks(up)
        assert blocks > 100
        client = await connect(up.nats, "test")
        async with open_ports(up.nats, NS, "test") as world:
            [pool] = await CardTable(world.cards).pools()
        damage = Damage(up, client, tmp_path, pool, expected, blocks)
        try:
            async with damage.done():
                position, _ = await damage.some_kv()
                await api(client, f"STREAM.MSG.DELETE.{damage.stream}", {"seq": position})
                await damage.forget_snapshots()
            assert damage.named(position)
            async with damage.done():
                await damage.forget_snapshots()
                position, data = await damage.some_kv()
                await damage.flip_on_disk(data)
            assert damage.named(position)
            async with damage.done():
                # Its snapshots, if there are any, are of another log.
                await api(client, f"STREAM.DELETE.{damage.stream}")
                await ensure_pool(client, NS, pool)
        finally:
            await client.close()
