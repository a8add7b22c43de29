"""The endpoints of workers, from their leases: which may be picked, in which order."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from headwater.actors.picker.pick import Endpoints
from headwater.events.memory import MemoryTable
from headwater.schemas.clock import SystemClock
from headwater.schemas.tables import Lease, ServedPart


class Fleet:
    """A lease table, and the endpoints that follow from it."""

    def __init__(self) -> None:
        self.table = MemoryTable(SystemClock())
        self.endpoints = Endpoints(self.table)

    async def join(self, name: str, endpoint: str, serves: ServedPart = "whole", pool: str = "p") -> None:
        """A worker of epoch 3 with this lease."""
        lease = Lease(kind="worker", name=name, pool=pool, epoch=3, serves=serves, endpoint=endpoint)
        await self.table.put(f"worker.{name}", msgspec.json.encode(lease))


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    made = Fleet()
    running = asyncio.create_task(made.endpoints.run())
    await made.endpoints.known.wait()
    yield made
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def until(holds: object) -> None:
    async with asyncio.timeout(10):
        while not holds():  # type: ignore[operator]
            await asyncio.sleep(0)


async def test_endpoints_come_and_go_with_leases(fleet: Fleet) -> None:
    """Each once, in turn; a worker that does not serve, decodes only or has none is no endpoint."""
    found = fleet.endpoints
    await fleet.join("a", "10.0.0.1:80")
    await fleet.join("a-dp1", "10.0.0.1:80")
    await fleet.join("b", "10.0.0.2:80", "prefill")
    await fleet.join("c", "10.0.0.3:80", "decode")
    await fleet.join("d", "10.0.0.4:80", "")
    await fleet.join("e", "")
    await fleet.join("f", "10.0.0.6:80", pool="q")
    await until(lambda: found.has_workers("q"))
    assert {found.of_pool("p") for _ in range(2)} == {
        ("10.0.0.1:80", "10.0.0.2:80"),
        ("10.0.0.2:80", "10.0.0.1:80"),
    }
    assert set(found.of_pool("")) == {"10.0.0.1:80", "10.0.0.2:80", "10.0.0.6:80"}
    assert found.of_pool("none") == ()
    assert found.unreachable("p") == ("e.3",)
    assert found.of("b") == "10.0.0.2:80"
    assert found.of("e") == found.of("nobody") == ""
    await fleet.table.delete("worker.f")
    await until(lambda: not found.has_workers("q"))


async def test_a_subset_leaves_the_others_out(fleet: Fleet) -> None:
    """An empty one all; one that has no worker's all, too."""
    found = fleet.endpoints
    await fleet.join("a", "10.0.0.1:80")
    await fleet.join("b", "[fd00::2]:80")
    await until(lambda: len(found.of_pool("p")) == 2)
    subset = frozenset({"[fd00::2]:80", "10.9.9.9:80"})
    assert found.of_pool("p", subset) == ("[fd00::2]:80",)
    assert found.unreachable("p", subset) == ("a.3",)
    assert (found.of("a", subset), found.of("b", subset)) == ("", "[fd00::2]:80")
    assert found.of_pool("p", frozenset()) == found.of_pool("p", frozenset({"10.9.9.9:80"})) == ()
