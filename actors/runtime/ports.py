"""The ports of an actor: its only interfaces to the outside, over NATS or in memory."""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from headwater.actors.bus.port import Bus
from headwater.events.blobs import Blobs
from headwater.events.log import Log
from headwater.events.snapshots.cache import SnapshotCache
from headwater.events.table import Table
from headwater.schemas.clock import Clock


class Ports(NamedTuple):
    """The ports of one namespace.

    `api_keys` and `secrets` are tables of edges: of other processes only an operator's may write them. `stored` is
    the table of stored responses, `videos` that of video jobs; only edges use these.
    `pool_log` opens the log of a pool and creates it where it is missing; `ids` makes short unique names. `cache`
    is this machine's copy of the newest snapshot's bulk data, None for none. `pool_logs` lists the pools that have a log, also those
    whose model is no longer served.
    """

    ns: str
    bus: Bus
    leases: Table
    cards: Table
    api_keys: Table
    secrets: Table
    blobs: Blobs
    stored: Table
    videos: Table
    requests: Log
    pool_log: Callable[[str], Awaitable[Log]]
    clock: Clock
    ids: Callable[[], str]
    cache: SnapshotCache | None = None
    pool_logs: Callable[[], Awaitable[list[str]]] | None = None
