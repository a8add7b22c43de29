"""Authentication of a real fleet under least permissions: revocation under load, tenants, rotation, nothing on disk."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
import pytest
import pytest_asyncio

from headwater.ops.nats.config import Wanted
from tests.support.processes.fleet import FleetProcess, fleet
from tests.system.test_least_rights import server

pytestmark = [
    pytest.mark.processes,
    pytest.mark.xdist_group("authentication"),
    pytest.mark.asyncio(loop_scope="module"),
]

PROMPT: Final = "Where does a river begin, and who keeps the secret of marmalade? " * 20
CHAT: Final[dict[str, Any]] = {
    "model": "sim",
    "messages": [{"role": "user", "content": PROMPT}],
    "max_tokens": 2,
    "ignore_eos": True,
}
CLIENTS: Final = 8
REVOKED_S_MAX: Final = 1.0


class Served(NamedTuple):
    """A fleet that accepts API keys, and the folder with everything that it stores."""

    up: FleetProcess
    folder: Path

    async def run(self, *words: str) -> str:
        """Output of a `headwater keys` command."""
        code, output = await self.up.command("keys", *words)
        assert code == 0, output
        return output

    async def create(self, tenant: str, *words: str) -> str:
        """A new key."""
        return (await self.run("create", "--tenant", tenant, *words)).split()[-1]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder = tmp_path_factory.mktemp("authentication")
    async with server(folder, Wanted("default")) as nats:
        flags = (
            "--engine",
            "sim",
            "--workers",
            "1",
            "--nats",
            nats.url,
            "--auth",
            "keys",
            "--host",
            "0.0.0.0",
        )
        async with fleet(folder, *flags, access=("--nats-keys-dir", str(folder))) as up:
            yield Served(up, folder)


async def ask(client: httpx.AsyncClient, key: str, **fields: Any) -> httpx.Response:
    """One request with a key."""
    return await client.post(
        "/v1/chat/completions", json={**CHAT, **fields}, headers={"authorization": f"Bearer {key}"}
    )


async def test_a_revoked_key_is_refused_within_a_second_under_load(served: Served) -> None:
    key, other = await served.create("acme"), await served.create("acme")
    asked: dict[str, list[tuple[float, int]]] = {key: [], other: []}
    stop = asyncio.Event()

    async def client_of(own: str, client: httpx.AsyncClient) -> None:
        while not stop.is_set():
            began = time.monotonic()
            asked[own].append((began, (await ask(client, own)).status_code))

    async with served.up.client() as client, asyncio.TaskGroup() as group:
        for number in range(CLIENTS):
            group.create_task(client_of(key if number else other, client))
        async with asyncio.timeout(60):
            while len(asked[key]) < 10 * CLIENTS:
                await asyncio.sleep(0.01)
            await served.run("revoke", key.split("-")[1])
            revoked = time.monotonic()
            while not asked[key] or asked[key][-1][0] < revoked + REVOKED_S_MAX:
                await asyncio.sleep(0.01)
        stop.set()
    # The command returns after the table changed: by then, or within a second of it, every edge refuses the key.
    assert {status for began, status in asked[key] if began > revoked + REVOKED_S_MAX} == {401}
    assert sum(status == 200 for _, status in asked[key]) >= 10 * CLIENTS
    # Another key of the same tenant is not affected.
    assert {status for _, status in asked[other]} == {200}
    assert asked[other][-1][0] > revoked


async def test_a_tenant_does_not_see_what_another_one_cached(served: Served) -> None:
    """Neither in usage nor in where the router sends it: the block hashes of two tenants have nothing in common."""
    a, also_a, b = [await served.create(tenant) for tenant in ("a", "a", "b")]
    prompt = {"messages": [{"role": "user", "content": "Of tenants: " + PROMPT}]}

    async with served.up.client() as client:

        async def cached(key: str) -> tuple[int, int]:
            response = await ask(client, key, **prompt)
            usage = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            return usage, int(response.headers["x-headwater-cached-blocks"])

        assert await cached(a) == (0, 0)
        async with asyncio.timeout(30):
            while (await cached(also_a))[1] == 0:
                await asyncio.sleep(0.02)
        assert (await cached(also_a))[0] > 0
        assert await cached(b) == (0, 0)


async def test_a_rotated_key_is_another_secret_for_the_same_key(served: Served) -> None:
    old = await served.create("acme", "--name", "ci", "--models", "sim", "--endpoints", "chat")
    key_id = old.split("-")[1]
    new = (await served.run("rotate", key_id, "--grace", "0s")).split()[-1]
    assert new.split("-")[1] == key_id
    async with served.up.client() as client, asyncio.timeout(30):
        while (await ask(client, old)).status_code != 401:
            await asyncio.sleep(0.01)
        assert (await ask(client, new)).status_code == 200
    listed = await served.run("list")
    assert f"{key_id}  acme    ci" in listed
    assert "models:sim endpoints:chat" in listed


async def test_no_secret_and_no_prompt_is_in_a_log_or_on_disk(served: Served) -> None:
    key = await served.create("acme")
    wrong = key[:-8] + "0badf00d"
    async with served.up.client() as client:
        assert (await ask(client, key)).status_code == 200
        assert (await ask(client, wrong)).status_code == 401
        assert (await ask(client, key, temperature="marmalade")).status_code == 400
    everything = b"".join(path.read_bytes() for path in served.folder.rglob("*") if path.is_file())
    assert key.split("-")[1].encode() in everything
    for secret in (key.split("-")[2], wrong.split("-")[2], "marmalade"):
        assert secret.encode() not in everything
