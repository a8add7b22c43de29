"""`headwater replay`: a pool's log folded again."""

from typing import Annotated

from msgspec import Meta

from headwater.ops.config.command import command
from headwater.ops.config.processes import PoolReader
from headwater.ops.config.setting import Flag


@command
def replay(
    settings: PoolReader,
    *,
    verify: Annotated[bool, Meta(description="recompute every decision and compare")] = False,
    bookmark: Annotated[
        str, Flag("from"), Meta(description="start from the snapshot with this bookmark")
    ] = "",
) -> int:
    """Fold a pool's log again, and verify its decisions."""
    from headwater.ops.operator import replay as operator
    from headwater.ops.process import signals

    return signals.run_command(
        lambda: operator.replay(settings.nats, settings.pool, verify=verify, bookmark=bookmark)
    )
