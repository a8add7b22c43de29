"""A thousand streams through Envoy at once, while a picker dies."""

import asyncio
from pathlib import Path

import httpx
import pytest

from tests.gateway.stage import kill, stage
from tests.support.processes.fleet import stream_text

pytestmark = [pytest.mark.processes, pytest.mark.soak, pytest.mark.timeout(300)]

STREAMS = 1_000
TOKENS = 4


async def test_a_thousand_streams_and_a_picker_that_dies(tmp_path: Path) -> None:
    """Each has its whole answer: what the dead picker had is decided by the other one, or by an edge. Nothing is left."""
    limits = httpx.Limits(max_connections=None)
    async with (
        stage(tmp_path) as made,
        httpx.AsyncClient(base_url=made.envoy.url, limits=limits, timeout=200) as client,
    ):
        ended = asyncio.Semaphore(0)

        async def one(number: int) -> tuple[str, int]:
            messages = [{"role": "user", "content": f"Stream {number % 50}. " * 20}]
            body = {"model": "sim", "messages": messages, "max_tokens": TOKENS, "ignore_eos": True}
            _, finish, usage = await stream_text(client, body)
            ended.release()
            return finish, usage["completion_tokens"]

        asked = [asyncio.create_task(one(number)) for number in range(STREAMS)]
        for _ in range(STREAMS // 5):
            await ended.acquire()
        kill(made.pickers[0])
        assert set(await asyncio.gather(*asked)) == {("length", TOKENS)}
        await made.idle()
        async with asyncio.timeout(30):
            while await made.counted():
                await asyncio.sleep(0.1)
        made.pickers[0].resume()
