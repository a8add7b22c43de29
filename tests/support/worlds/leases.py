"""Leases as a pool's router and worker hold them."""

import msgspec

from headwater.actors.runtime.ports import Ports
from headwater.schemas.subjects import lease_key
from headwater.schemas.tables import Lease


async def put_leases(world: Ports, pool: str) -> None:
    """A router and a worker that serves whole requests: the pool is routable."""
    router = Lease(kind="router", name=f"r-{pool}", pool=pool, epoch=1)
    worker = Lease(kind="worker", name=f"w-{pool}", pool=pool, epoch=1, serves="whole")
    await world.leases.put(lease_key("router", router.name), msgspec.json.encode(router))
    await world.leases.put(lease_key("worker", worker.name), msgspec.json.encode(worker))
