"""What an actor may touch: its ports. Real ones over NATS, or memory ones in tests; actors never know."""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from headwater.actors.bus_port import Bus
from headwater.events.blobs import Blobs
from headwater.events.log import Log
from headwater.events.snapshot_cache import SnapshotCache
from headwater.events.table import Table
from headwater.schemas.clock import Clock


class World(NamedTuple):
    """The ports of one namespace.

    `pool_log` opens (and creates where missing) the log of a pool; `ids` makes short unique names. `cache` is
    where this machine keeps the newest snapshot's bulk, None for nowhere.
    """

    ns: str
    bus: Bus
    leases: Table
    cards: Table
    blobs: Blobs
    requests: Log
    pool_log: Callable[[str], Awaitable[Log]]
    clock: Clock
    ids: Callable[[], str]
    cache: SnapshotCache | None = None
