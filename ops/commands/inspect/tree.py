"""`headwater tree`: the cached blocks of a pool."""

from typing import Annotated

from msgspec import Meta

from headwater.ops.config.command import command
from headwater.ops.config.processes import PoolReader
from headwater.ops.config.setting import Flag


@command
def tree(
    settings: PoolReader,
    *,
    worker: Annotated[str, Meta(description="only blocks that this worker caches, and their ancestors")] = "",
    depth: Annotated[int, Meta(description="only runs that begin before block N of a prompt; -1: all")] = -1,
    limit: Annotated[int, Meta(ge=1, description="maximum number of runs, the largest first")] = 50,
    as_json: Annotated[bool, Flag("json"), Meta(description="print JSON")] = False,
) -> int:
    """Show the blocks cached by a pool's workers, as a tree of prefixes."""
    from headwater.ops.operator import tree as operator
    from headwater.ops.process import signals

    return signals.run_command(
        lambda: operator.show_tree(
            settings.nats, settings.pool, worker=worker, depth=depth, limit=limit, as_json=as_json
        )
    )
