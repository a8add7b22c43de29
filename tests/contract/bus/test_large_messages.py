"""The `Bus` contract on messages larger than the server's `max_payload`: they arrive, whole and in order."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from headwater.actors.runtime.ports import BusError, Message
from tests.support.ports.buses import BusCase, answer, keep, memory_bus, nats_bus
from tests.support.ports.waiting import eventually
from tests.support.servers.nats import NatsServer, running

DEFAULT_PAYLOAD = 1024 * 1024
"""`max_payload` of a server whose configuration says nothing of it."""

SIZES = (DEFAULT_PAYLOAD - 1, DEFAULT_PAYLOAD, DEFAULT_PAYLOAD + 1, 5 * DEFAULT_PAYLOAD + 7)


@pytest.fixture(scope="module")
def plain_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A server with the default limit."""
    with NatsServer(tmp_path_factory.mktemp("plain"), settings={"max_payload": DEFAULT_PAYLOAD}) as server:
        yield server


@pytest.fixture(params=["memory", "nats"])
async def plain(request: pytest.FixtureRequest, plain_server: NatsServer) -> AsyncIterator[BusCase]:
    """Two buses at that server, or in memory."""
    async with memory_bus() if request.param == "memory" else nats_bus(plain_server) as case:
        yield case


@pytest.mark.parametrize("size", SIZES)
async def test_a_request_of_any_size_arrives_whole(plain: BusCase, unique: str, size: int) -> None:
    """Once, with the subject to reply to."""
    got: list[Message] = []

    async def handle(message: Message) -> None:
        got.append(message)
        await plain.other.publish(message.reply, b"taken")

    await plain.other.subscribe(unique, handle)
    await plain.settle()
    data = random.Random(size).randbytes(size)
    assert await plain.bus.request(unique, data, timeout_s=30) == b"taken"
    assert [(one.subject, one.data == data) for one in got] == [(unique, True)]


async def test_messages_of_all_sizes_stay_in_order(plain: BusCase, unique: str) -> None:
    """A large one does not come after a small one that was sent later; two senders do not mix."""
    got: list[Message] = []
    await plain.other.subscribe(unique, keep(got))
    await plain.settle()
    sent = [bytes([number]) * (3 * DEFAULT_PAYLOAD if number % 2 else 10) for number in range(6)]
    for data in sent:
        await plain.bus.publish(unique, data)
    await eventually(lambda: len(got) == len(sent))
    assert [one.data for one in got] == sent
    got.clear()
    both = [b"a" * 3 * DEFAULT_PAYLOAD, b"b" * 3 * DEFAULT_PAYLOAD]
    await asyncio.gather(plain.bus.publish(unique, both[0]), plain.other.publish(unique, both[1]))
    await eventually(lambda: len(got) == 2)
    assert sorted(one.data for one in got) == both


async def test_a_large_request_to_nobody_fails_at_once(plain: BusCase, unique: str) -> None:
    """As a small one does."""
    async with asyncio.timeout(20):
        with pytest.raises(BusError, match="no subscriber"):
            await plain.bus.request(unique, bytes(3 * DEFAULT_PAYLOAD), timeout_s=60)


async def test_a_server_with_a_small_limit(tmp_path: Path, unique: str) -> None:
    """Whatever it allows: pieces fit."""
    async with running(tmp_path, max_payload=65_536) as server:
        async with nats_bus(server) as case:
            await case.other.subscribe(unique, answer(case.other, b"taken"))
            await case.settle()
            assert await case.bus.request(unique, bytes(1_000_000), timeout_s=30) == b"taken"
