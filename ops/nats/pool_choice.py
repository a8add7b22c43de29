"""The choice of the pool that a command reads, or that a router without `--pool` serves."""

from headwater.actors.runtime.persistence import Ports
from headwater.actors.runtime.tables import CardTable, LeaseTable
from headwater.events.ports import LogError
from headwater.ops.config.setting import ConfigError


async def choose_pool(ports: Ports, wanted: str) -> str:
    """`wanted`, or the only pool, or the only one that has workers. Raises `ConfigError` if there is no such one, or several.

    A pool whose workers have all left can still be read: as long as its model card is there, and then as long as its log is. Without any
    card or log it cannot be said which pools there are.
    """
    found = await CardTable(ports.cards).pools()
    if wanted in found or (not found and wanted):
        return wanted
    logs = await _logs(ports) if wanted or not found else []
    if wanted in logs:
        return wanted
    if wanted:
        known = ", ".join(sorted({*found, *logs}))
        raise ConfigError(f"--pool {wanted}: there is no such pool; there are: {known}")
    choices = found or logs
    if len(choices) > 1:
        live = await live_pools(ports)
        served = [pool for pool in choices if pool in live]
        choices = served if len(served) == 1 else choices
    if len(choices) != 1:
        raise ConfigError(
            f"--pool: there are {len(choices)} pools ({', '.join(choices) or 'none'}); name one"
        )
    return choices[0]


async def live_pools(ports: Ports) -> set[str]:
    """The pools that have workers now."""
    return {one.pool for one in await LeaseTable(ports.leases).read_all() if one.kind == "worker"}


async def first_pool(ports: Ports, model: str = "") -> str:
    """The pool of the first worker, of this model if one is given, that takes or renews its lease; waits for one.

    A lease that is merely there may be one that a killed fleet left a moment ago, as cards are of what earlier runs served.
    """
    cards = CardTable(ports.cards)
    is_first = True
    async for changes in LeaseTable(ports.leases).watch():
        pools = {
            held.pool for kind, _, held in changes if kind == "worker" and held is not None and held.pool
        }
        for pool in sorted(pools) if not is_first else ():
            if not model or await _serves(cards, pool, model):
                return pool
        is_first = False
    raise ConfigError("the lease table ended")


async def _serves(cards: CardTable, pool: str, model: str) -> bool:
    """Is the pool this model's? Its card may not be there yet: then its workers' next renewals of their leases ask again."""
    card = await cards.get_model(pool)
    return card is not None and card.name == model


async def _logs(ports: Ports) -> list[str]:
    """The pools that have a log; none where that may not be asked."""
    if ports.pool_logs is None:
        return []
    try:
        return await ports.pool_logs()
    except LogError:
        return []
