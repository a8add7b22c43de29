"""A whole fleet as real processes, as a user starts it, and the means to hurt it."""

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec

from headwater.ops.children import child_environment
from headwater.schemas import subjects

READY = re.compile(rb"ready at (http://[^/]+)/v1 .*NATS (nats://[0-9.:]+)")


class FleetProcess:
    """`headwater up` in a process group of its own."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        url: str,
        nats: str,
        log: Path,
        access: tuple[str, ...] = (),
    ) -> None:
        self.process = process
        self.url = url
        self.nats = nats
        self.log = log
        self.access = access

    def pids(self, what: str) -> list[int]:
        """Processes of this fleet whose command line holds `what`."""
        found = []
        for pid in descendants(self.process.pid):
            line = command_line(pid)
            if what in line:
                found.append(pid)
        return sorted(found)

    def kill(self, what: str) -> int:
        """SIGKILL the first process whose command line holds `what`; returns its id."""
        pid = self.pids(what)[0]
        os.kill(pid, signal.SIGKILL)
        return pid

    async def kill_worker(self, name: str) -> int:
        """SIGKILL the worker that holds this lease, wherever it runs on this machine; returns its id."""
        import nats

        client = await nats.connect(self.nats)
        try:
            table = await client.jetstream().key_value(subjects.lease_bucket("default"))
            entry = await table.get(subjects.lease_key("worker", name))
            pid: int = msgspec.json.decode(entry.value or b"{}")["pid"]
        finally:
            await client.close()
        os.kill(pid, signal.SIGKILL)
        return pid

    async def stats(self) -> list[dict[str, Any]]:
        """What the actors answer to $SRV.STATS."""
        import nats

        client = await nats.connect(self.nats)
        inbox = client.new_inbox()
        replies = await client.subscribe(inbox)
        await client.publish("$SRV.STATS", b"", reply=inbox)
        answers: list[dict[str, Any]] = []
        try:
            while True:
                message = await replies.next_msg(timeout=0.3)
                answers.append(msgspec.json.decode(message.data))
        except TimeoutError:
            await client.close()
        return [
            {"name": answer["name"], "id": answer["id"], **answer["endpoints"][0]["data"]}
            for answer in answers
        ]

    async def until(
        self, what: str, holds: Callable[[list[dict[str, Any]]], bool], within_s: float = 60
    ) -> list[dict[str, Any]]:
        """Wait until the actors' statistics satisfy `holds`; returns them.

        Asked once more, an actor of a busy machine may not answer in time.
        """
        deadline = time.monotonic() + within_s
        while True:
            stats = await self.stats()
            if holds(stats):
                return stats
            assert time.monotonic() < deadline, f"never came true: {what}; {stats}"

    async def blocks(self) -> int:
        """Blocks in the router's index."""
        stats = await self.until("the router answers", lambda stats: any("blocks" in one for one in stats))
        return max(int(one["blocks"]) for one in stats if "blocks" in one)

    async def until_indexed(self, blocks: int) -> None:
        """Wait until the router's index holds so many blocks: events follow the tokens by milliseconds."""
        await self.until(
            f"{blocks} blocks in the index",
            lambda stats: any(s.get("blocks", 0) >= blocks for s in stats),
        )

    async def command(self, *arguments: str) -> tuple[int, str]:
        """Run another headwater command against this fleet's server."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "headwater.ops.cli",
            *arguments,
            "--nats",
            self.nats,
            *self.access,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=child_environment(),
        )
        async with asyncio.timeout(60):
            output, _ = await process.communicate()
        return process.returncode or 0, output.decode()

    async def stop(self) -> int:
        """Ctrl-C; returns the exit code."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGINT)
        async with asyncio.timeout(60):
            return await self.process.wait()

    def client(self) -> httpx.AsyncClient:
        """An HTTP client for this fleet."""
        return httpx.AsyncClient(base_url=self.url, timeout=60)


@asynccontextmanager
async def fleet(
    folder: Path, *flags: str, ready_s: float = 60, access: tuple[str, ...] = ()
) -> AsyncIterator[FleetProcess]:
    """A fleet on free ports with its data in `folder`. On leaving: every decision in its log is made again.

    `access` are flags to log in with: for the fleet, and for commands against its server.
    """
    log = folder / "up.log"
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "headwater.ops.cli",
            "up",
            "--port",
            "0",
            "--nats-port",
            "0",
            "--data-dir",
            str(folder / "data"),
            "--log-format",
            "json",
            *flags,
            *access,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            env=child_environment(),
            start_new_session=True,
        )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(ready_s):
            while True:
                line = await process.stdout.readline()
                assert line, f"headwater up ended before it was ready:\n{log.read_text()[-3000:]}"
                match = READY.search(line)
                if match:
                    break
        made = FleetProcess(process, match[1].decode(), match[2].decode(), log, access)
        yield made
        if process.returncode is None:
            code, output = await made.command("replay", "--verify")
            assert code == 0, output
        left = descendants(process.pid)
        assert await made.stop() == 0
        alive = [pid for pid in left if command_line(pid)]
        assert not alive, f"left behind: {[command_line(pid) for pid in alive]}"
    finally:
        if process.returncode is None:
            for pid in [*descendants(process.pid), process.pid]:
                os.kill(pid, signal.SIGKILL)
            await process.wait()


def descendants(pid: int) -> list[int]:
    """Ids of all processes below `pid`."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found: list[int] = []
    stack = [pid]
    while stack:
        for child in children.get(stack.pop(), []):
            found.append(child)
            stack.append(child)
    return found


def command_line(pid: int) -> str:
    """Command line of a process, empty when it is gone or only waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


async def stream_text(
    client: httpx.AsyncClient,
    body: dict[str, Any],
    on_text: Callable[[int], None] | None = None,
) -> tuple[str, str, dict[str, Any]]:
    """Stream a chat completion; returns text, finish reason and usage. `on_text` gets the chunks' number."""
    text, finish, chunks = "", "", 0
    usage: dict[str, Any] = {}
    request = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", "/v1/chat/completions", json=request) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            document = msgspec.json.decode(line[6:])
            assert "error" not in document, document
            usage = document.get("usage") or usage
            for choice in document["choices"]:
                finish = choice["finish_reason"] or finish
                piece = choice["delta"].get("content") or ""
                if piece:
                    text += piece
                    chunks += 1
                    if on_text is not None:
                        on_text(chunks)
    return text, finish, usage
