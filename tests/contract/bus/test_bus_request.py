"""The `Bus` contract on requests: one answer, or a named reason why there is none."""

import asyncio

import pytest
from nats.aio.client import Client

from headwater.actors.runtime.core_nats import NatsBus
from headwater.actors.runtime.ports import BusClosed, Message, NoResponder, ReplyTimeout
from tests.support.ports.buses import BusCase, answer, keep
from tests.support.ports.waiting import eventually


async def test_request_gets_its_own_answer(bus_case: BusCase, unique: str) -> None:
    """Many at once, each with the reply that was meant for it."""
    await bus_case.other.subscribe(unique, answer(bus_case.other))
    await bus_case.settle()
    questions = [str(number).encode() for number in range(200)]
    replies = await asyncio.gather(
        *(bus_case.bus.request(unique, question, timeout_s=30) for question in questions)
    )
    assert replies == questions


async def test_first_answer_counts(bus_case: BusCase, unique: str) -> None:
    """A second answer is nobody's business."""

    async def twice(message: Message) -> None:
        await bus_case.other.publish(message.reply, b"first")
        await bus_case.other.publish(message.reply, b"second")

    await bus_case.other.subscribe(unique, twice)
    await bus_case.settle()
    for _ in range(5):
        assert await bus_case.bus.request(unique, b"?", timeout_s=30) == b"first"


async def test_request_to_nobody_fails_at_once(bus_case: BusCase, unique: str) -> None:
    """`NoResponder` long before the timeout, also after the last subscriber left."""
    async with asyncio.timeout(20):
        with pytest.raises(NoResponder, match=unique):
            await bus_case.bus.request(unique, b"?", timeout_s=60)
        subscription = await bus_case.other.subscribe(unique, answer(bus_case.other))
        await bus_case.settle()
        assert await bus_case.bus.request(unique, b"?", timeout_s=60) == b"?"
        await subscription.unsubscribe()
        await bus_case.settle()
        with pytest.raises(NoResponder):
            await bus_case.bus.request(unique, b"?", timeout_s=60)


async def test_request_without_an_answer_times_out(bus_case: BusCase, unique: str) -> None:
    """`ReplyTimeout` tells that somebody may have got it."""
    got: list[Message] = []
    await bus_case.other.subscribe(unique, keep(got))
    await bus_case.settle()
    with pytest.raises(ReplyTimeout, match=unique):
        await bus_case.bus.request(unique, b"?", timeout_s=0.2)
    await eventually(lambda: len(got) == 1)
    assert got[0].reply


async def test_late_answer_to_a_timed_out_request_is_harmless(bus_case: BusCase, unique: str) -> None:
    """It does not become the answer to the next request."""
    held: list[Message] = []
    subscription = await bus_case.other.subscribe(unique, keep(held))
    await bus_case.settle()
    with pytest.raises(ReplyTimeout):
        await bus_case.bus.request(unique, b"1", timeout_s=0.2)
    await subscription.unsubscribe()
    await bus_case.other.subscribe(unique, answer(bus_case.other, b"fresh"))
    await bus_case.settle()
    await eventually(lambda: len(held) == 1)
    await bus_case.other.publish(held[0].reply, b"late")
    assert await bus_case.bus.request(unique, b"2", timeout_s=30) == b"fresh"


async def test_handler_may_request_and_unsubscribe(bus_case: BusCase, unique: str) -> None:
    """A handler uses the bus as anybody does, and may end its own subscription."""
    answers: list[bytes] = []
    ended = False
    await bus_case.other.subscribe(f"{unique}.echo", answer(bus_case.other))

    async def once(message: Message) -> None:
        nonlocal ended
        answers.append(await bus_case.bus.request(f"{unique}.echo", message.data, timeout_s=30))
        ended = True
        await subscription.unsubscribe()

    subscription = await bus_case.bus.subscribe(f"{unique}.once", once)
    await bus_case.settle()
    await bus_case.other.publish(f"{unique}.once", b"1")
    await eventually(lambda: answers == [b"1"])
    await eventually(lambda: ended)
    await bus_case.settle()
    with pytest.raises(NoResponder):
        await bus_case.other.request(f"{unique}.once", b"2", timeout_s=30)
    assert answers == [b"1"]


async def test_closed_connection_is_told(client: Client, unique: str) -> None:
    """`BusClosed`, not an error of the client library."""
    bus = NatsBus(client)
    await bus.close()
    await bus.close()
    with pytest.raises(BusClosed):
        await bus.publish(unique, b"x")
    with pytest.raises(BusClosed):
        await bus.request(unique, b"x", timeout_s=1)
