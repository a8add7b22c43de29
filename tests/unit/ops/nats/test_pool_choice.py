"""Which pool a command reads: the only one, or the one that is named, if there is one of that name; and which one a router serves."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from headwater.actors.runtime.ports import Ports
from headwater.ops.config.processes import RouterProcess
from headwater.ops.config.setting import ConfigError
from headwater.ops.nats.connect import choose_pool, first_pool
from headwater.ops.start.router import run_router
from headwater.schemas.names import pool_name
from headwater.schemas.subjects import lease_key
from headwater.schemas.tables import Lease, LeaseKind
from tests.support.worlds.clock import ManualClock, settle
from tests.support.worlds.edge import serve_model
from tests.support.worlds.memory import memory_world


async def test_a_pool_that_is_not_there_is_named_with_those_that_are() -> None:
    """Reading the log of a mistyped name would make its stream, and find nothing wrong in it."""
    world = memory_world(ManualClock())
    with pytest.raises(ConfigError, match=r"--pool: there are 0 pools \(none\); name one"):
        await choose_pool(world, "")
    assert await choose_pool(world, "c") == "c"
    first = await serve_model(world, "first")
    assert await choose_pool(world, "") == first
    second = await serve_model(world, "second")
    assert await choose_pool(world, second) == second
    with pytest.raises(ConfigError, match=rf"--pool c: there is no such pool; there are: {first}, {second}"):
        await choose_pool(world, "c")
    with pytest.raises(ConfigError, match=rf"--pool: there are 2 pools \({first}, {second}\); name one"):
        await choose_pool(world, "")


async def renew(world: Ports, name: str, pool: str, kind: LeaseKind = "worker") -> None:
    """An actor of a pool lives: it takes its lease, or writes it again."""
    lease = Lease(kind=kind, name=name, pool=pool, epoch=1)
    await world.leases.put(lease_key(kind, name), msgspec.json.encode(lease))


@asynccontextmanager
async def choosing(world: Ports, model: str = "") -> AsyncIterator["asyncio.Task[str]"]:
    """A router that looks for its pool."""
    task = asyncio.create_task(first_pool(world, model))
    try:
        await settle()
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_router_serves_the_pool_that_has_workers() -> None:
    """And none of those that earlier runs left, whichever of them is the first."""
    world = memory_world(ManualClock())
    for name in ("a", "z"):
        await serve_model(world, name)
    present = await serve_model(world, "m")
    async with choosing(world) as chosen:
        assert not chosen.done(), "no pool has a worker yet"
        await renew(world, "w1", present)
        async with asyncio.timeout(10):
            assert await chosen == present


async def test_a_lease_that_is_only_left_is_no_worker() -> None:
    """A fleet that was killed a moment ago has leases, and the next one may serve another model under the same names."""
    world = memory_world(ManualClock())
    before, after = await serve_model(world, "before"), await serve_model(world, "then")
    await renew(world, "w1", before)
    async with choosing(world) as chosen:
        assert not chosen.done()
        await renew(world, "w1", after)
        async with asyncio.timeout(10):
            assert await chosen == after


async def test_a_worker_that_was_there_before_the_router_is_found() -> None:
    """By its next renewal."""
    world = memory_world(ManualClock())
    pool = await serve_model(world, "m")
    await renew(world, "w1", pool)
    async with choosing(world) as chosen:
        await renew(world, "w1", pool)
        async with asyncio.timeout(10):
            assert await chosen == pool


async def test_a_router_for_a_model_passes_over_the_pools_of_others() -> None:
    """Also where its own model's card is not there yet: a worker that encodes media takes its lease without one."""
    world = memory_world(ManualClock())
    other = await serve_model(world, "a")
    async with choosing(world, "org/Model") as chosen:
        await renew(world, "w1", other)
        await renew(world, "w2", pool_name("org/Model", 16))
        await settle()
        assert not chosen.done()
        present = await serve_model(world, "org/Model")
        assert present == pool_name("org/Model", 16)
        await renew(world, "w1", other)
        await renew(world, "w2", present)
        async with asyncio.timeout(10):
            assert await chosen == present


async def test_a_router_has_one_way_to_choose_its_pool() -> None:
    with pytest.raises(ConfigError, match="--pool and --for-model both choose"):
        await run_router(RouterProcess(pool="p", for_model="m"), asyncio.Event())


@pytest.mark.parametrize("kind", ["router", "shadow", "edge"])
async def test_only_workers_make_a_pool(kind: LeaseKind) -> None:
    """Another router may still look after a pool that nobody serves."""
    world = memory_world(ManualClock())
    left, present = await serve_model(world, "a"), await serve_model(world, "m")
    async with choosing(world) as chosen:
        await renew(world, "r1", left, kind)
        await settle()
        assert not chosen.done()
        await renew(world, "w1", present)
        async with asyncio.timeout(10):
            assert await chosen == present


async def test_the_only_pool_with_workers_need_not_be_named() -> None:
    """What earlier runs left can still be read, by its name."""
    world = memory_world(ManualClock())
    left, present = await serve_model(world, "a"), await serve_model(world, "m")
    await renew(world, "w1", present)
    assert await choose_pool(world, "") == present
    assert await choose_pool(world, left) == left
    await renew(world, "w2", left)
    with pytest.raises(ConfigError, match=rf"--pool: there are 2 pools \({left}, {present}\); name one"):
        await choose_pool(world, "")
