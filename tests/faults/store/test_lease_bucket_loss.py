"""The bucket of leases is deleted under load: a fleet of any age goes on, and so does its next start."""

from pathlib import Path

import httpx
import msgspec
import pytest
from nats.aio.client import Client

from headwater.events.jetstream import connect
from headwater.events.jetstream.api import api
from headwater.schemas import subjects
from headwater.schemas.tables import Lease
from tests.faults.answers import client_of, settle, start, succeeds, under_way, unserved
from tests.support.processes.fleet import FleetProcess, fleet

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

BUCKET = subjects.lease_bucket("default")
AGE = 500
"""Revisions that the bucket has before the workers of the test start: two minutes of renewals."""

STREAMS = 4
TOKENS = 800
STALLED_S_MAX = 20.0
"""A stream that moves may wait for the lease of a worker to be taken again."""

SERVED_S_MAX = 10.0


async def _age(client: Client) -> None:
    """Let the bucket's revisions grow as an old fleet's have, by the lease of an edge that is long gone."""
    gone = msgspec.json.encode(Lease(kind="edge", name="gone", pool="", host="nowhere", pid=0))
    for _ in range(AGE):
        await client.publish(f"$KV.{BUCKET}.{subjects.lease_key('edge', 'gone')}", gone)
    await client.flush()


async def _new_lives(up: FleetProcess) -> None:
    """Kill both workers, and wait for their next lives: those began late in the bucket's life."""
    for name in ("worker-0", "worker-1"):
        up.kill(f"--name {name}")

    def back(stats: list[dict[str, object]]) -> bool:
        ready = [one for one in stats if one["name"] == "headwater-worker" and one["state"] == "ready"]
        return len(ready) == 2

    await up.until("two workers again", back)


async def _lost_and_served(up: FleetProcess, client: httpx.AsyncClient, admin: Client, repair: bool) -> None:
    """Delete the bucket under running answers; whoever makes it again, clients notice nothing that lasts."""
    answers = start(client, STREAMS, TOKENS)
    await under_way(answers)
    await api(admin, f"STREAM.DELETE.KV_{BUCKET}")
    if repair:
        code, output = await up.command("streams", "--repair")
        assert code == 0, output
    refused = await unserved(lambda: succeeds(client), within_s=SERVED_S_MAX)
    problems = [refused] * bool(refused) + await settle(answers, stalled_s=STALLED_S_MAX)
    assert not problems, "\n".join([f"bucket made by {'an operator' if repair else 'nobody'}", *problems])
    code, output = await up.command("streams")
    assert code == 0, output


@pytest.mark.soak
async def test_a_deleted_lease_bucket_costs_no_stream_and_no_request(tmp_path: Path) -> None:
    """Running answers end right, new requests succeed within seconds, and a restart on the same data serves."""
    flags = ("--engine", "sim", "--workers", "2")
    async with fleet(tmp_path, *flags) as up, client_of(up.url) as client:
        admin = await connect(up.nats, "test")
        await _age(admin)
        await _new_lives(up)
        assert not await unserved(lambda: succeeds(client), within_s=SERVED_S_MAX)
        for repair in (True, False):
            await _lost_and_served(up, client, admin, repair)
        await admin.close()
    async with fleet(tmp_path, *flags) as up, client_of(up.url) as client:
        assert await succeeds(client) == ""
