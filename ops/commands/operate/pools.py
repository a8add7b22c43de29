"""`headwater pools`: the streams of a namespace and the logs of its pools."""

from typing import Annotated

from msgspec import Meta

from headwater.ops.config.command import command
from headwater.ops.config.processes import PoolOperator


@command
def pools(
    settings: PoolOperator,
    *,
    watch: Annotated[bool, Meta(description="keep running, and create the logs of new pools")] = False,
) -> int:
    """Create the namespace's streams and the logs of its pools, and list them."""
    from headwater.ops.operator import pools as operator
    from headwater.ops.process import signals

    return signals.run(
        lambda stop: operator.create_pools(settings.nats, settings.streams, settings.pool, stop, watch=watch)
    )
