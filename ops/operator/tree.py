"""`headwater tree`: what a pool's workers hold, as a tree, from the newest snapshot and the log behind it."""

import msgspec

from headwater.events.log import Log, Unreadable
from headwater.events.snapshots.store import SnapshotStore, continues
from headwater.ops.config.errors import ConfigError
from headwater.ops.config.nats import NatsSettings
from headwater.ops.nats.connect import operator_ports
from headwater.ops.nats.pool_choice import choose_pool
from headwater.router.fold.state import RouterState, in_order
from headwater.router.index.tree import text, tree


async def show_tree(
    nats: NatsSettings, pool: str, *, worker: str, depth: int, limit: int, as_json: bool
) -> int:
    """Print it. Raises `ConfigError` for a worker that the pool does not have."""
    async with operator_ports(nats, "tree") as ports:
        pool = await choose_pool(ports, pool)
        state = await folded(await ports.pool_log(pool), SnapshotStore(ports.blobs, pool))
    try:
        found = tree(state.index, worker=worker, depth=depth, limit=limit)
    except LookupError as error:
        raise ConfigError(f"--worker: {error.args[0]}") from error
    if as_json:
        print(msgspec.json.encode({"pool": pool, "position": state.position, "tree": found}).decode())
    else:
        print(f"pool {pool} at position {state.position}: {text(found)}")
        if state.cold:
            print(f"ignored until they report their blocks again: {', '.join(sorted(state.cold))}")
    return 0


async def folded(log: Log, store: SnapshotStore) -> RouterState:
    """The state at the log's end."""
    bounds, identity = await log.bounds(), await log.identity()
    snapshot = await store.newest(lambda position: continues(position, bounds))
    state = RouterState(whole=bounds.first <= 1)
    if snapshot is not None:
        try:
            kept = RouterState.restore(snapshot)
            state = kept if kept.log in ("", identity) else state
        except (LookupError, TypeError, ValueError) as error:
            print(f"the snapshot at position {snapshot.position} is unreadable: {error}")
    if state.position == 0 and bounds.first > 1:
        print(
            f"positions 1 to {bounds.first - 1} are gone and no snapshot continues them: blocks are missing"
        )
    async for piece in log.read(state.position, follow=False):
        for message in in_order(piece):
            if isinstance(message, Unreadable):
                state.skip(message)
            else:
                state.apply(message)
    return state
