"""A table of the store is deleted under load: who wrote into it writes that again, and no client has to know."""

import asyncio
from pathlib import Path

import httpx
import pytest
from nats.aio.client import Client

from headwater.events.jetstream import connect
from headwater.events.jetstream.api import api
from headwater.events.jetstream.streams import stream_names
from headwater.schemas import subjects
from headwater.schemas.names import pool_name
from tests.faults.answers import client_of, settle, start, succeeds, under_way, unserved
from tests.support.processes.fleet import fleet

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

NS = "default"
LOST = {
    "cards": [subjects.table_stream(subjects.card_bucket(NS))],
    "blobs": [subjects.object_stream(subjects.blob_bucket(NS))],
    "log": [subjects.pool_stream(NS, pool_name("sim", 16))],
    "everything": [],
}
"""The streams that are deleted; none: all that there are."""

STREAMS = 4
TOKENS = 800
STALLED_S_MAX = 20.0
SERVED_S_MAX = 20.0
REQUESTS = 40
"""Requests after each loss, one after the other."""

LOSSES_OF_SOAK = 2


async def _lose(admin: Client, streams: list[str]) -> None:
    """Delete them at once."""
    names = streams or await stream_names(admin, "")
    await asyncio.gather(*(api(admin, f"STREAM.DELETE.{name}") for name in names))


async def _not_retryable(client: httpx.AsyncClient) -> list[str]:
    """What clients were told that makes them give up, over some requests."""
    problems = [await succeeds(client) for _ in range(REQUESTS)]
    return [one for one in problems if one.startswith("status 4")]


@pytest.mark.parametrize(
    ("what", "losses"),
    [("everything", 1), *(pytest.param(one, LOSSES_OF_SOAK, marks=pytest.mark.soak) for one in LOST)],
)
async def test_a_lost_table_is_whole_again(tmp_path: Path, what: str, losses: int) -> None:
    """Running answers end right; no request is told that its model does not exist; and an edge that starts later serves."""
    async with fleet(tmp_path, "--engine", "sim", "--workers", "2") as up, client_of(up.url) as client:
        admin = await connect(up.nats, "test")
        before = await stream_names(admin, "")
        for _ in range(losses):
            answers = start(client, STREAMS, TOKENS)
            await under_way(answers)
            await _lose(admin, LOST[what])
            refused = await _not_retryable(client)
            problems = [*refused[:1], *await settle(answers, stalled_s=STALLED_S_MAX)]
            problems += (
                [problem] if (problem := await unserved(lambda: succeeds(client), SERVED_S_MAX)) else []
            )
            assert not problems, "\n".join(problems)
        # It knows nothing but what is stored.
        up.kill(" edge ")
        assert not await unserved(lambda: succeeds(client), within_s=SERVED_S_MAX)
        assert await stream_names(admin, "") == before
        await admin.close()
