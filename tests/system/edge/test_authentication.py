"""Authentication of a real fleet under least permissions: two edges that share keys, limits and stores; nothing on disk."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
import pytest
import pytest_asyncio
from websockets.asyncio.client import connect

from headwater.ops.nats.config import Wanted
from tests.support.processes.fleet import FleetProcess, fleet
from tests.support.processes.restarted import kept_edge, until_healthy
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
CONNECTION_S: Final = 1
SHARE_BYTES: Final = 64 * 1024
PER_MINUTE: Final = 40


class Served(NamedTuple):
    """A fleet that accepts API keys, and the folder with everything that it stores."""

    up: FleetProcess
    other: str
    """URL of the second edge."""
    folder: Path

    def both(self, key: str) -> tuple[httpx.AsyncClient, httpx.AsyncClient]:
        """A client of each edge, with this key."""
        headers = {"authorization": f"Bearer {key}"}
        urls = (self.up.url, self.other)
        return httpx.AsyncClient(base_url=urls[0], headers=headers, timeout=60), httpx.AsyncClient(
            base_url=urls[1], headers=headers, timeout=60
        )

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
        access = ("--nats-keys-dir", str(folder))
        # Its limits are small, so that a test reaches them.
        small = (
            "--responses",
            f"connection_s={CONNECTION_S},tenant_bytes_max={SHARE_BYTES}",
        )
        async with (
            fleet(folder, *flags, access=access) as up,
            kept_edge(folder, nats.url, "edge-b", "--auth", "keys", *access, *small) as (_, other),
        ):
            await until_healthy(other)
            yield Served(up, other, folder)


async def ask(client: httpx.AsyncClient, key: str, **fields: Any) -> httpx.Response:
    """One request with a key."""
    return await client.post(
        "/v1/chat/completions", json={**CHAT, **fields}, headers={"authorization": f"Bearer {key}"}
    )


async def known(*clients: httpx.AsyncClient) -> None:
    """Wait until the clients' edges know their key."""
    async with asyncio.timeout(30):
        for client in clients:
            while (await client.get("/v1/models")).status_code != 200:
                await asyncio.sleep(0.01)


async def test_a_revoked_key_is_refused_under_load(served: Served) -> None:
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
            while asked[key][-1][1] != 401:
                await asyncio.sleep(0.01)
            refused = time.monotonic()
            while min(asked[one][-1][0] for one in asked) < refused:
                await asyncio.sleep(0.01)
        stop.set()
    # The command returns after the table changed: by then, or soon after it, the edge refuses the key, and does so from then on.
    assert {status for began, status in asked[key] if began > refused} == {401}
    assert sum(status == 200 for _, status in asked[key]) >= 10 * CLIENTS
    # Another key of the same tenant is not affected.
    assert {status for _, status in asked[other]} == {200}
    assert asked[other][-1][0] > refused


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


async def test_an_updated_key_means_the_new_scopes_at_every_edge(served: Served) -> None:
    """Its secret stays. Within a second on an idle machine; here it is only awaited."""
    key = await served.create("acme", "--requests-per-minute", "1000")
    key_id = key.split("-")[1]

    async def until(status: int, client: httpx.AsyncClient) -> httpx.Response:
        async with asyncio.timeout(30):
            while (response := await ask(client, key)).status_code != status:
                await asyncio.sleep(0.01)
        return response

    for client in served.both(key):
        async with client:
            await until(200, client)
            assert (
                await served.run("update", key_id, "--endpoints", "embeddings,tokenize")
                == f"updated {key_id}\n"
            )
            assert "endpoints:chat" in (await until(403, client)).text
            await served.run("update", key_id, "--endpoints", "*", "--requests-per-minute", "2000")
            shown = await until(200, client)
            assert shown.headers["x-ratelimit-limit-requests"] == "2000"


async def test_what_one_edge_admits_the_other_one_counts(served: Served) -> None:
    """A key's limit is used up at one edge; the other, which never served the key, refuses it."""
    limit = 10
    key = await served.create("acme", "--requests-per-minute", str(limit))
    clients = served.both(key)
    async with clients[0], clients[1]:
        await known(*clients)
        assert [(await ask(clients[0], key, max_tokens=1)).status_code for _ in range(limit)] == [200] * limit
        # By itself the second one would admit as many; it has time to hear of the first.
        for _ in range(limit - 1):
            if (await ask(clients[1], key, max_tokens=1)).status_code == 429:
                break
            await asyncio.sleep(0.5)
        else:
            pytest.fail("the second edge never heard of what the first one admitted")


async def test_two_edges_at_once_admit_twice_a_limit_at_most(served: Served) -> None:
    """The documented error: until they have heard of each other, each admits what is left of the limit."""
    key = await served.create("acme", "--requests-per-minute", str(PER_MINUTE))
    clients = served.both(key)
    async with clients[0], clients[1]:
        await known(*clients)
        began = time.monotonic()
        statuses = [
            response.status_code
            for response in await asyncio.gather(
                *(ask(client, key, max_tokens=1) for _ in range(PER_MINUTE + 10) for client in clients)
            )
        ]
        drained = (time.monotonic() - began) * PER_MINUTE / 60
        admitted = statuses.count(200)
        assert set(statuses) == {200, 429}
        assert PER_MINUTE <= admitted <= 2 * (PER_MINUTE + drained)
        print(f"admitted {admitted} of {len(statuses)} with a limit of {PER_MINUTE} a minute")
        # The excess is debt: for as long as it drains, neither edge admits anything.
        async with asyncio.timeout(30):
            while [(await ask(client, key)).status_code for client in clients] != [429, 429]:
                await asyncio.sleep(0.05)


async def test_a_connection_ends_with_its_time_limit(served: Served) -> None:
    """An event that says why, then an orderly close; what runs is finished before."""
    key = await served.create("acme")
    url = served.other.replace("http://", "ws://") + "/v1/responses"
    async with asyncio.timeout(30):
        async with served.both(key)[1] as client:
            await known(client)
        async with connect(url, additional_headers={"authorization": f"Bearer {key}"}) as socket:
            began = time.monotonic()
            create = {"type": "response.create", "model": "sim", "input": "Hi.", "max_output_tokens": 1}
            await socket.send(json.dumps(create))
            kinds = [
                (event["type"], event.get("error", {}).get("code"))
                async for event in (json.loads(message) async for message in socket)
            ]
            assert time.monotonic() - began > 0.9 * CONNECTION_S
            assert kinds[-1] == ("error", "websocket_connection_limit_reached")
            assert ("response.incomplete", None) in kinds
            assert socket.close_code == 1000


async def test_a_tenants_responses_displace_its_own_only(served: Served) -> None:
    """With the rights of an edge, over HTTP: beyond its share a tenant loses its oldest responses."""
    loud, quiet = await served.create("loud"), await served.create("quiet")

    async def store(client: httpx.AsyncClient) -> str:
        body = {"model": "sim", "input": "x" * 4_000, "max_output_tokens": 1}
        response = await client.post("/v1/responses", json=body)
        assert response.json()["store"] is True
        return str(response.json()["id"])

    async def status(client: httpx.AsyncClient, id_: str) -> int:
        return (await client.get(f"/v1/responses/{id_}")).status_code

    _, mine = served.both(loud)
    _, other = served.both(quiet)
    async with mine, other:
        await known(mine, other)
        kept = await store(other)
        ids = [await store(mine) for _ in range(30)]
        found = [await status(mine, id_) for id_ in ids]
        assert found == sorted(found, reverse=True)
        assert (found[0], found[-1]) == (404, 200)
        assert found.count(200) > 5
        assert await status(other, kept) == 200


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
