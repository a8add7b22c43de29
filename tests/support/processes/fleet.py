"""A whole fleet as real processes, as a user starts it, and the means to hurt it."""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import httpx
import msgspec
import nats
import pytest
import pytest_asyncio
from nats.aio.client import Client

from headwater.ops.start.children import child_environment
from headwater.schemas import subjects
from tests.support.processes import zygote

if TYPE_CHECKING:
    import openai

SILENCE_S = 0.3
GRACE_S = 0.05
WHOLE_S = 60.0
READY_POLL_S = 0.02

LINE_FIELDS = ("timestamp", "level", "logger", "event", "kind", "pid")


class FleetProcess:
    """`headwater up` in a process group of its own."""

    def __init__(
        self, process: zygote.Process, url: str, nats: str, log: Path, access: tuple[str, ...] = ()
    ) -> None:
        self.process = process
        self.url = url
        self.nats = nats
        self.log = log
        self.access = access
        self._client: Client | None = None
        self._answered: set[str] = set()

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
        pid = await self.worker_pid(name)
        os.kill(pid, signal.SIGKILL)
        return pid

    async def worker_pid(self, name: str) -> int:
        """The process of the worker that holds this lease."""
        client = await nats.connect(self.nats.split(","))
        try:
            table = await client.jetstream().key_value(subjects.lease_bucket("default"))
            entry = await table.get(subjects.lease_key("worker", name))
            pid: int = msgspec.json.decode(entry.value or b"{}")["pid"]
        finally:
            await client.close()
        return pid

    async def kill_engine(self, name: str, title: str) -> int:
        """SIGKILL the process of a worker's engine that has `title` in its command line, and leave the worker's own; returns its id."""
        found = [pid for pid in descendants(await self.worker_pid(name)) if title in command_line(pid)]
        assert len(found) == 1, f"{len(found)} processes of {name} are {title!r}"
        os.kill(found[0], signal.SIGKILL)
        return found[0]

    async def stats(self, *, quick: bool = False) -> list[dict[str, Any]]:
        """What the actors answer to $SRV.STATS within `SILENCE_S` of each other.

        `quick`: return soon after all that answered the last time have answered; a new actor may be missing.
        """
        client = await self.connected()
        inbox = client.new_inbox()
        replies = await client.subscribe(inbox)
        await client.publish("$SRV.STATS", b"", reply=inbox)
        answers: list[dict[str, Any]] = []
        wanted = set(self._answered) if quick else set()
        with contextlib.suppress(TimeoutError):
            while True:
                message = await replies.next_msg(timeout=GRACE_S if quick and not wanted else SILENCE_S)
                if not message.data:
                    # The word of a server that was just started: nobody listens yet.
                    await asyncio.sleep(GRACE_S)
                    break
                answers.append(msgspec.json.decode(message.data))
                wanted.discard(answers[-1]["id"])
        await replies.unsubscribe()
        self._answered = {answer["id"] for answer in answers}
        return [
            {"name": answer["name"], "id": answer["id"], **answer["endpoints"][0]["data"]}
            for answer in answers
        ]

    async def connected(self) -> Client:
        if self._client is None or not self._client.is_connected:
            await self.close()
            self._client = await nats.connect(self.nats.split(","))
        return self._client

    async def close(self) -> None:
        """Close the connection of `stats`."""
        if self._client is not None:
            client, self._client = self._client, None
            await client.close()

    async def until(
        self, what: str, holds: Callable[[list[dict[str, Any]]], bool], within_s: float = 60
    ) -> list[dict[str, Any]]:
        """Wait until the actors' statistics satisfy `holds`; returns them.

        Asked once more, an actor of a busy machine may not answer in time.
        """
        deadline = time.monotonic() + within_s
        for attempt in count():
            stats = await self.stats(quick=attempt % 2 == 0 and bool(self._answered))
            if holds(stats):
                return stats
            assert time.monotonic() < deadline, f"never came true: {what}; {stats}"
        raise AssertionError("count ended")

    async def blocks(self) -> int:
        """Blocks in the router's index."""
        stats = await self.until("the router answers", lambda stats: any("blocks" in one for one in stats))
        return max(int(one["blocks"]) for one in stats if "blocks" in one)

    async def until_indexed(self, blocks: int) -> None:
        """Wait until the router's index holds so many blocks: events follow the tokens by milliseconds."""
        await self.until(
            f"{blocks} blocks in the index", lambda stats: any(s.get("blocks", 0) >= blocks for s in stats)
        )

    async def until_whole(self, workers: int = 2, within_s: float = WHOLE_S) -> None:
        """Wait until the edge answers, and a router and so many workers are ready: for the next test of this fleet."""

        def whole(stats: list[dict[str, Any]]) -> bool:
            ready = [one["name"] for one in stats if one.get("state") == "ready"]
            return ready.count("headwater-worker") == workers and "headwater-router" in ready

        await self.until(f"a router and {workers} workers", whole, within_s)
        deadline = time.monotonic() + WHOLE_S
        async with self.client() as client:
            while True:
                with contextlib.suppress(httpx.TransportError):
                    health = (await client.get("/health")).json()
                    if health["status"] == "ok" and sum(health["workers"].values()) == workers:
                        return
                assert time.monotonic() < deadline, "the edge does not know the workers"
                await asyncio.sleep(0.02)

    async def command(self, *arguments: str) -> tuple[int, str]:
        """Run another headwater command against this fleet's server."""
        process = await zygote.start(
            *arguments, "--nats", self.nats, *self.access, stdout=zygote.PIPE, stderr=zygote.STDOUT
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
        return httpx.AsyncClient(base_url=self.url, timeout=60, verify=False)

    def official_client(self) -> "openai.AsyncOpenAI":
        """OpenAI's own client, without its retries: an error is seen, not repeated."""
        import openai

        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)


@asynccontextmanager
async def fleet(
    folder: Path,
    *flags: str,
    ready_s: float = 60,
    access: tuple[str, ...] = (),
    vllm: bool = False,
    sglang: bool = False,
    program: tuple[str, ...] = (),
    environ: Mapping[str, str] | None = None,
) -> AsyncIterator[FleetProcess]:
    """A fleet on free ports with its data in `folder`. On leaving: every decision in its log is made again.

    `access` are flags to log in with: for the fleet, and for commands against its server. `vllm`, `sglang`: fork it
    from a process that has imported that engine. `program`: arguments before `up`, for another program than `headwater` (`zygote`).
    `environ`: further variables.
    """
    log = folder / "up.log"
    with log.open("wb") as errors:
        process = await zygote.start(
            *program,
            "up",
            *("--port", "0", "--nats-port", "0", "--console-port", "0"),
            *("--data-dir", str(folder / "data"), "--log-format", "json"),
            *flags,
            *access,
            stdout=zygote.PIPE,
            stderr=errors,
            environ=child_environment() | dict(environ) if environ else None,
            vllm=vllm,
            sglang=sglang,
        )
    try:
        ready = await _until_ready(process, log, ready_s)
        url, server = ready["url"].removesuffix("/v1"), ready["nats"]
        made = FleetProcess(process, url, server, log, access)
        try:
            yield made
        finally:
            await made.close()
        if process.returncode is None:
            code, output = await made.command("replay", "--verify")
            assert code == 0, output
            assert '"logger"' not in output, f"what is replayed is logged: {output}"
        left = descendants(process.pid)
        assert await made.stop() == 0
        alive = [pid for pid in left if command_line(pid)]
        assert not alive, f"left behind: {[command_line(pid) for pid in alive]}"
        log_lines(log)
        assert process.stdout is not None
        assert not await process.stdout.read(), "what is not a log line is printed"
    finally:
        if process.returncode is None:
            for pid in [*descendants(process.pid), process.pid]:
                # A child may end between the look and the signal; the failure that led here is the one to report.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await process.wait()
        await process.close_outputs()


def shared_fleet(*flags: str, scope: Literal["module", "package"] = "module", **more: Any) -> Any:
    """A fixture for a module or a package: one fleet for all of its tests, in their event loop."""

    @pytest_asyncio.fixture(scope=scope, loop_scope=scope)
    async def up(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FleetProcess]:
        async with fleet(tmp_path_factory.mktemp("fleet"), *flags, **more) as made:
            yield made

    return up


def log_lines(log: Path) -> list[dict[str, Any]]:
    """All lines that a fleet has written: each is a JSON object with the fields of every line, whichever process wrote it."""
    found = []
    for text in log.read_bytes().splitlines():
        line = json.loads(text)
        assert [name for name in line if name in LINE_FIELDS] == [*LINE_FIELDS], text
        found.append(line)
    return found


async def _until_ready(process: zygote.Process, log: Path, ready_s: float) -> dict[str, Any]:
    """The line with which `headwater up` says that it is ready."""
    async with asyncio.timeout(ready_s):
        while True:
            ended = process.returncode is not None
            for text in log.read_bytes().splitlines():
                if b'"fleet_ready"' in text:
                    line: dict[str, Any] = json.loads(text)
                    return line
            assert not ended, f"headwater up ended before it was ready:\n{log.read_text()[-3000:]}"
            await asyncio.sleep(READY_POLL_S)


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
    client: httpx.AsyncClient, body: dict[str, Any], on_text: Callable[[int], None] | None = None
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
