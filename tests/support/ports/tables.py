"""What the tests of the `Table` contract share: a table under test, time, and a watcher that writes down."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

from headwater.events.jetstream import JetStreamTable
from headwater.events.jetstream.api import api
from headwater.events.jetstream.stream_spec import table_stream
from headwater.events.jetstream.streams import ensure
from headwater.events.memory import MemoryTable
from headwater.events.table import Table, TableEntry
from tests.support.ports.logs import connected
from tests.support.servers.nats import NatsServer

TTL_S = 1


class TableCase(NamedTuple):
    """A table under test. `other` is the same table seen by another process; `passes(s)` lets time pass.

    `replace()` deletes the whole table and makes it anew; both see the new one.
    """

    table: Table
    other: Table
    passes: Callable[[float], Awaitable[None]]
    replace: Callable[[], Awaitable[None]]


class ManualClock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def wall_ns(self) -> int:
        """See `Clock.wall_ns`."""
        return int(self.now_s * 1e9)

    def monotonic_s(self) -> float:
        """See `Clock.monotonic_s`."""
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        """See `Clock.sleep`."""
        raise AssertionError("a table does not sleep")


@asynccontextmanager
async def memory_table() -> AsyncIterator[TableCase]:
    """A `MemoryTable` on a manual clock."""
    clock = ManualClock()
    table = MemoryTable(clock)

    async def passes(seconds: float) -> None:
        clock.now_s += seconds
        table.expire()

    async def replace() -> None:
        table.replace()

    yield TableCase(table, table, passes, replace)


@asynccontextmanager
async def jetstream_table(server: NatsServer, bucket: str) -> AsyncIterator[TableCase]:
    """A `JetStreamTable` on a fresh bucket, and another over a connection of its own."""
    async with connected(server) as client, connected(server) as other:
        spec = table_stream(bucket, 1)
        await ensure(client, spec)

        async def replace() -> None:
            messages = 1
            # nats-server 2.15.1 now and then makes a stream that was deleted just before with its old messages.
            while messages:
                await api(client, f"STREAM.DELETE.{spec.name}")
                await ensure(client, spec)
                messages = (await api(client, f"STREAM.INFO.{spec.name}"))["state"]["messages"]

        yield TableCase(JetStreamTable(client, bucket), JetStreamTable(other, bucket), asyncio.sleep, replace)


class Watcher:
    """What a watch told: every entry in order, and in `first` what came at once."""

    def __init__(self) -> None:
        self.first: list[TableEntry] | None = None
        self.entries: list[TableEntry] = []
        self.failure: BaseException | None = None

    def state(self) -> dict[str, bytes]:
        """The table as this watcher knows it. Fails if the watch ended."""
        if self.failure is not None:
            raise AssertionError("the watch ended") from self.failure
        known = {entry.key: entry.value for entry in self.entries}
        return {key: value for key, value in known.items() if value is not None}

    def told(self, key: str) -> list[bytes | None]:
        """Values of one key in the order they were told."""
        return [entry.value for entry in self.entries if entry.key == key]

    async def run(self, table: Table) -> None:
        """Watch until cancelled."""
        changes = table.watch()
        try:
            async for entries in changes:
                if self.first is None:
                    self.first = entries
                self.entries += entries
        except Exception as error:
            self.failure = error
            raise
        finally:
            assert isinstance(changes, AsyncGenerator)
            await changes.aclose()


@asynccontextmanager
async def watching(table: Table) -> AsyncIterator[Watcher]:
    """A watcher that has been told the present state."""
    watcher = Watcher()
    task = asyncio.create_task(watcher.run(table))
    try:
        async with asyncio.timeout(30):
            while watcher.first is None:
                assert not task.done()
                await asyncio.sleep(0.005)
        yield watcher
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
