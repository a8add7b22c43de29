"""`headwater snapshots`: a pool's snapshots, and bookmarks that keep them indefinitely."""

import time

from headwater.events.snapshots.store import Kept, SnapshotStore
from headwater.ops.config.errors import ConfigError
from headwater.ops.config.nats import NatsSettings
from headwater.ops.nats.connect import operator_ports
from headwater.ops.nats.pool_choice import choose_pool
from headwater.ops.process.text_table import table
from headwater.schemas.names import InvalidName


async def snapshots(
    nats: NatsSettings, pool: str, *, bookmark: str = "", position: int | None = None, drop: str = ""
) -> int:
    """List, or name one (the newest, where no position is given), or drop a name. Raises `ConfigError`."""
    async with operator_ports(nats, "snapshots") as ports:
        pool = await choose_pool(ports, pool)
        store = SnapshotStore(ports.blobs, pool)
        try:
            if bookmark:
                named = await name(store, bookmark, position)
                print(f"bookmark {bookmark}: the snapshot of pool {pool} at position {named} is kept")
                return 0
            if drop:
                if not await store.bookmarks.drop(drop):
                    raise ConfigError(f"--drop {drop}: {await _known(store)}")
                print(f"bookmark {drop} is dropped; its snapshot goes when a newer one is saved")
                return 0
        except InvalidName as error:
            raise ConfigError(str(error)) from error
        print(listing(pool, await store.listing(), await store.bookmarks.all(), time.time_ns()))
        return 0


async def name(store: SnapshotStore, bookmark: str, position: int | None = None) -> int:
    """Name a snapshot and return its position. Raises `ConfigError` if there is none or it is unreadable."""
    positions = await store.positions()
    if not positions:
        raise ConfigError("there is no snapshot yet; a router saves one within a minute, and when it stops")
    wanted = positions[-1] if position is None else position
    if wanted not in positions:
        raise ConfigError(f"--position {wanted}: there are snapshots at {', '.join(map(str, positions))}")
    problem = next((kept.problem for kept in await store.listing() if kept.position == wanted), "")
    if problem:
        raise ConfigError(f"--position {wanted}: the snapshot is unreadable: {problem}")
    before = (await store.bookmarks.all()).get(bookmark)
    await store.bookmarks.put(bookmark, wanted)
    if wanted not in await store.positions():
        # A router dropped it while it was being named.
        if before is None:
            await store.bookmarks.drop(bookmark)
        else:
            await store.bookmarks.put(bookmark, before)
        raise ConfigError(f"--position {wanted}: a newer snapshot has just taken its place; name that one")
    return wanted


async def _known(store: SnapshotStore) -> str:
    names = ", ".join(sorted(await store.bookmarks.all()))
    return f"no such bookmark; there are {names}" if names else "no such bookmark; there are none"


def listing(pool: str, kept: list[Kept], bookmarks: dict[str, int], now_ns: int) -> str:
    """Snapshots as a table, newest last."""
    rows = []
    for one in kept:
        names = " ".join(sorted(name for name, position in bookmarks.items() if position == one.position))
        if one.manifest is None:
            rows.append((one.position, "", "", "", f"unreadable: {one.problem}", names))
            continue
        made = one.manifest.made_ns
        blocks = one.manifest.facts.get("rows", "")
        age = _age((now_ns - made) / 1e9) if made else "unknown"
        rows.append((one.position, age, f"{one.size:,}", f"{blocks:,}", one.manifest.digest, names))
    head = f"pool {pool}: {len(kept)} snapshots"
    missing = sorted(name for name, at in bookmarks.items() if at not in {one.position for one in kept})
    lost = f"\nbookmarks without their snapshot: {', '.join(missing)}" if missing else ""
    columns = ("position", "age", "bytes", "blocks", "digest", "bookmarks")
    return (f"{head}\n{table(columns, rows)}" if rows else head) + lost


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
