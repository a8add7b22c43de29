"""What the tests of the `Bus` contract share: a bus under test and simple handlers."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

from headwater.actors.runtime.core_nats import NatsBus
from headwater.actors.runtime.ports import Bus, Handler, MemoryBus, Message
from tests.support.ports.logs import connected
from tests.support.servers.nats import NatsServer


class BusCase(NamedTuple):
    """A bus under test and another process's; after `settle()` each knows the other's subscriptions."""

    bus: Bus
    other: Bus
    settle: Callable[[], Awaitable[None]]


@asynccontextmanager
async def memory_bus() -> AsyncIterator[BusCase]:
    """A `MemoryBus`, which is one for all."""
    bus = MemoryBus()

    async def at_once() -> None:
        pass

    yield BusCase(bus, bus, at_once)


@asynccontextmanager
async def nats_bus(server: NatsServer) -> AsyncIterator[BusCase]:
    """Two `NatsBus`es over a connection each."""
    async with connected(server) as one, connected(server) as two:
        buses = NatsBus(one), NatsBus(two)

        async def settle() -> None:
            for each in buses:
                await each.flush()

        yield BusCase(*buses, settle)


def keep(messages: list[Message]) -> Handler:
    """A handler that writes down what it gets."""

    async def handle(message: Message) -> None:
        messages.append(message)

    return handle


def answer(bus: Bus, text: bytes = b"") -> Handler:
    """A handler that replies with `text`, or with what it was sent."""

    async def handle(message: Message) -> None:
        await bus.publish(message.reply, text or message.data)

    return handle
