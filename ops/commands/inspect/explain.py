"""`headwater explain`: the routing decisions of a request."""

from typing import Annotated

from msgspec import Meta

from headwater.ops.config.command import command
from headwater.ops.config.processes import PoolReader
from headwater.ops.config.setting import Flag


@command
def explain(
    request: Annotated[str, Meta(description="request id, as in the header x-request-id")],
    /,
    *,
    every: Annotated[
        bool,
        Flag("all"),
        Meta(
            description="show every candidate: recomputes from the log what a decision of a large fleet does not keep"
        ),
    ] = False,
    settings: PoolReader,
) -> int:
    """Explain the routing decisions of a request: what each worker would have cost, and which was chosen."""
    from headwater.ops.operator import explain as operator
    from headwater.ops.process import signals

    return signals.run_command(lambda: operator.explain(settings.nats, settings.pool, request, every=every))
