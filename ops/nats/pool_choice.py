"""Which pool a command reads."""

from headwater.actors.runtime.ports import Ports
from headwater.actors.runtime.tables import CardTable
from headwater.ops.config.errors import ConfigError


async def choose_pool(ports: Ports, wanted: str) -> str:
    """`wanted`, or the only pool. Raises `ConfigError` if there are others and no such one, or none or several to choose from.

    A pool whose workers have all left keeps its model cards, so its log can still be read. Without any card it cannot be said which pools there are.
    """
    found = await CardTable(ports.cards).pools()
    if wanted:
        if found and wanted not in found:
            raise ConfigError(f"--pool {wanted}: there is no such pool; there are: {', '.join(found)}")
        return wanted
    if len(found) != 1:
        raise ConfigError(f"--pool: there are {len(found)} pools ({', '.join(found) or 'none'}); name one")
    return found[0]


async def first_pool(ports: Ports) -> str:
    """The pool of the first model card; waits for one."""
    async for pools in CardTable(ports.cards).watch_pools():
        if pools:
            return pools[0]
    raise ConfigError("the card table ended")
