"""What a fleet says of its encode workers and of what became of images."""

import re
from collections import Counter

from tests.support.processes.fleet import FleetProcess


async def encode_legs(fleet: FleetProcess) -> Counter[str]:
    """Images that were considered for encode workers, by outcome."""
    async with fleet.client() as client:
        page = (await client.get("/metrics")).text
    found = re.findall(r'^headwater_edge_encode_legs_total{outcome="(\w+)"} ([0-9.]+)', page, re.M)
    return Counter({outcome: int(float(count)) for outcome, count in found})


async def until_it_encodes(fleet: FleetProcess) -> None:
    """Wait until the encode worker has joined."""
    await fleet.until(
        "there is an encode worker",
        lambda stats: any(one.get("role") == "encode" and one.get("state") == "ready" for one in stats),
    )
