"""A crowded fleet as real processes under least permissions: requests wait, are refused beyond the bound, and outlive a router."""

import asyncio
from pathlib import Path

import httpx
import pytest

from headwater.ops.nats import config as nats_config
from headwater.ops.nats.config import Wanted
from headwater.ops.start.sockets import free_port
from tests.support.processes.fleet import fleet, stream_text
from tests.support.servers.nats import NatsServer

pytestmark = [pytest.mark.processes]

CHAT = {"model": "sim", "messages": [{"role": "user", "content": "Where does a river begin?"}]}
PATH = "/v1/chat/completions"


async def test_requests_wait_for_the_only_worker(tmp_path: Path) -> None:
    """Two wait, a third is refused; their router dies, and both have their answer; a worker may be tainted."""
    port = free_port(0)
    nats_config.write(Wanted("default")._replace(port=port, store=str(tmp_path / "js")), tmp_path)
    nats = NatsServer(tmp_path, port=port, config=tmp_path / "nats.conf")
    await nats.start()
    flags = ("--engine", "sim", "--workers", "1", "--nats", nats.url, "--taint", "spot")
    queue = ("--busy", "kv=0.00001", "--queue", "requests=2,tenant_share=1")
    access = ("--nats-keys-dir", str(tmp_path))
    headers = {"x-headwater-tolerates": "spot"}
    try:
        async with fleet(tmp_path, *flags, *queue, access=access) as up, up.client() as client:
            client.headers.update(headers)

            async def ask(**more: str) -> httpx.Response:
                return await client.post(PATH, json={**CHAT, "max_tokens": 4}, headers=more)

            begun = asyncio.Event()
            body = {**CHAT, "max_tokens": 3_000, "ignore_eos": True}
            long = asyncio.create_task(stream_text(client, body, lambda _: begun.set()))
            async with asyncio.timeout(20):
                await begun.wait()
            late = await ask(**{"x-headwater-deadline-ms": "300"})
            assert late.status_code == 503, late.text
            assert late.json()["error"]["code"] == "deadline_exceeded"
            asked = {asyncio.create_task(ask()) for _ in range(3)}
            async with asyncio.timeout(20):
                [refused], waiting = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            beyond = refused.result()
            assert beyond.status_code == 503, beyond.text
            assert beyond.json()["error"]["code"] == "overloaded"
            assert int(beyond.headers["retry-after"]) >= 1
            up.kill(" router ")
            long.cancel()
            await asyncio.gather(long, return_exceptions=True)
            async with asyncio.timeout(40):
                answers = await asyncio.gather(*waiting)
            assert [answer.status_code for answer in answers] == [200, 200], [one.text for one in answers]
            for command in (("ctl", "worker-0", "taint", "batch"), ("ctl", "list")):
                code, output = await up.command(*command)
                assert code == 0, output
            assert "batch, spot" in output
            answer = await ask(**{"x-headwater-tolerates": "spot,batch"})
            assert answer.status_code == 200, answer.text
        assert nats.violations() == []
    finally:
        nats.stop()
