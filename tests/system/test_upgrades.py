"""Upgrades of a real fleet: a canary that a gate catches, one that is promoted, a rollback by hand; a backup restored on another server."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path

import httpx
import msgspec
import pytest

from tests.support.processes import zygote
from tests.support.processes.fleet import FleetProcess, fleet
from tests.support.processes.restarted import KeptProcess
from tests.support.servers.nats import NatsServer

pytestmark = [pytest.mark.processes]

SLOW = "0,0,30,0,0,30"
"""Step times of the planted fault: several times those of the good workers."""

FAST = "0,0,4,0,0,4"

QUICK = ("--canary", "50", "--hold", "1s", "--samples", "12")


CLIENTS = 4

FLAGS = (
    *("--engine", "sim", "--workers", "1", "--revision", "r1", "--sim-step-time", FAST),
    *("--client-policies", "kv,direct"),
)


class Load:
    """Clients that ask without a pause. None may fail."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self._numbers = count()
        self.problems: list[str] = []
        self.workers: Counter[str] = Counter()
        self.last_id = ""

    async def ask(self) -> None:
        """One request with a prompt of its own."""
        body = {"model": "sim", "prompt": f"{next(self._numbers)} springs", "max_tokens": 6, "temperature": 0}
        answer = await self._client.post("/v1/completions", json=body)
        if answer.status_code != 200:
            self.problems.append(answer.text)
        else:
            self.workers[answer.headers["x-headwater-worker"].partition(".")[0]] += 1
            self.last_id = answer.headers["x-request-id"]

    async def run(self) -> None:
        """One client. Does not return."""
        while True:
            await self.ask()


@contextlib.asynccontextmanager
async def under_load(client: httpx.AsyncClient, clients: int = CLIENTS) -> AsyncIterator[Load]:
    """Requests all the time."""
    load = Load(client)
    tasks = [asyncio.create_task(load.run()) for _ in range(clients)]
    try:
        yield load
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert load.problems == []


@contextlib.asynccontextmanager
async def worker_of(
    up: FleetProcess, folder: Path, name: str, revision: str, step: str, *flags: str
) -> AsyncIterator[None]:
    """Another worker of the fleet, of this revision."""
    line = ["engine", "--engine", "sim", "--name", name, "--workers", "1", "--nats", up.nats]
    kept = KeptProcess(
        name, folder / f"{name}.log", [*line, "--revision", revision, "--sim-step-time", step, *flags]
    )
    kept.start()
    try:
        yield
    finally:
        await kept.stop()


async def command(up: FleetProcess, *words: str, code: int = 0) -> str:
    """What a command prints."""
    status, text = await up.command(*words)
    assert status == code, text
    return text


@pytest.mark.timeout(120)
async def test_a_canary_with_a_fault_is_rolled_back_by_its_gate(tmp_path: Path) -> None:
    """Under load, without a failed request; what was done is explained, audited and replayed."""
    async with fleet(tmp_path, *FLAGS) as up, up.client() as client:
        async with worker_of(up, tmp_path, "bad-0", "r2", SLOW), under_load(client) as load:
            await up.until_whole(2)
            text = await command(up, "switch", "--to", "r2", *QUICK, code=1)
            assert "r2: rolled back: gate failed: " in text
            load.workers.clear()
            text = await command(up, "switch", "--json")
            assert msgspec.json.decode(text)["split"]["shares"] == {"r1": 1.0, "r2": 0.0}
            assert load.workers["bad-0"] <= CLIENTS
            while load.workers["worker-0"] < 2 * CLIENTS:
                await asyncio.sleep(0.02)
        text = await command(up, "explain", load.last_id)
        assert "revision r1: drawn by weights r1=1 r2=0, seed" in text
        assert "gate failed: " in await command(up, "log", "--audit")


@pytest.mark.soak
@pytest.mark.timeout(240)
async def test_a_good_revision_and_a_policy_are_promoted_and_rolled_back_by_hand(tmp_path: Path) -> None:
    """With canned prompts, and prefill and decode apart; the unknown revision is named; a copy of it all replays on another server."""
    split = ("--prefill-workers", "1", "--decode-workers", "1", "--disaggregate", "always")
    async with fleet(tmp_path, *FLAGS[:2], *FLAGS[4:], *split) as up, up.client() as client:
        added = worker_of(up, tmp_path, "p2", "r3", FAST, "--role", "prefill")
        async with (
            added,
            worker_of(up, tmp_path, "d2", "r3", FAST, "--role", "decode"),
            under_load(client) as load,
        ):
            await up.until_whole(4)
            text = await command(up, "switch", "--to", "r9", code=2)
            assert "no worker is of this revision; the pool's revisions are: r1, r3" in text
            prompts = tmp_path / "prompts.jsonl"
            prompts.write_text(
                '"Where does a river begin?"\n{"messages": [{"role": "user", "content": "Why?"}]}\n'
            )
            canned = ("--gate", "answers=1", "--gate", "errors=1", "--prompts", str(prompts), "--url", up.url)
            text = await command(up, "switch", "--to", "r3", *QUICK, *canned)
            assert "r3: promoted: 50 % held for " in text
            assert "2 of 2 canned prompts answered alike" in text
            text = await command(up, "rollback", "--reason", "rehearsal")
            assert "roll-out to r3: rolled back" in text
            text = await command(up, "switch", "--to-policy", "least_loaded", *QUICK, "--gate", "errors=1")
            assert "least_loaded: promoted" in text
            assert "(none)" not in await command(up, "switch", "--policy")
            await command(up, "rollback", "--policy")
            await command(up, "backup", "--out", str(tmp_path / "copy"))
            assert load.workers.total() > 100
    server = NatsServer(tmp_path / "second")
    await server.start()
    try:
        assert "every log's chain of digests is whole" in await beside(
            server, "restore", str(tmp_path / "copy")
        )
        assert ": equal" in await beside(server, "replay", "--verify")
        assert "rehearsal" in await beside(server, "log", "--audit")
        # A fleet goes on from there.
        again = tmp_path / "again"
        again.mkdir()
        async with (
            fleet(again, *FLAGS, "--nats", server.url) as up,
            up.client() as client,
            under_load(client) as load,
        ):
            while load.workers.total() < 20:
                await asyncio.sleep(0.05)
    finally:
        server.stop()


async def beside(server: NatsServer, *words: str) -> str:
    """What a command against that server prints."""
    process = await zygote.start(*words, "--nats", server.url, stdout=zygote.PIPE, stderr=zygote.STDOUT)
    async with asyncio.timeout(60):
        output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()
