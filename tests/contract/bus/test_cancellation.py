"""A task that awaits an answer of NATS can be cancelled at the moment at which the answer arrives."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from headwater.events.jetstream import connect
from tests.support.ports.waiting import eventually
from tests.support.servers.nats import NatsServer


@pytest.fixture
def url(servers: Callable[[bool], NatsServer]) -> str:
    """Of a shared server, which starts outside the test's event loop."""
    return servers(False).url


@pytest.fixture
async def client(url: str) -> AsyncIterator[Client]:
    """A connection of the test's own."""
    made = await connect(url, "test")
    yield made
    await made.close()


async def _cancelled(task: asyncio.Task[None]) -> bool:
    """Wait for the task's end: was it cancelled, or did it run on?"""
    await asyncio.wait([task], timeout=10)
    assert task.done()
    return task.cancelled()


@pytest.mark.parametrize("answered", [True, False], ids=["answer", "deadline"])
async def test_request(client: Client, unique: str, answered: bool) -> None:
    """On Python 3.11 `asyncio.wait_for` alone would drop the cancellation, and the task would run on."""
    held: list[Msg] = []

    async def hold(message: Msg) -> None:
        held.append(message)

    async def ask() -> None:
        await client.request(unique, b"1", timeout=30)

    await client.subscribe(unique, cb=hold)
    task = asyncio.create_task(ask())
    await eventually(lambda: len(held) == 1)
    (reply,) = client._resp_map.values()
    reply.add_done_callback(lambda _: task.cancel())
    if answered:
        await held[0].respond(b"2")
    else:
        reply.set_exception(TimeoutError())
    assert await _cancelled(task)


async def test_flush(client: Client) -> None:
    """The same for what waits until the server has everything."""
    task = asyncio.create_task(client.flush())
    await asyncio.sleep(0)
    client._pongs[-1].add_done_callback(lambda _: task.cancel())
    assert await _cancelled(task)
