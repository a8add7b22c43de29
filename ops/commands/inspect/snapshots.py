"""`headwater snapshots`: a pool's snapshots, and bookmarks that keep them."""

from typing import Annotated

from msgspec import Meta

from headwater.ops.config.command import command
from headwater.ops.config.errors import ConfigError
from headwater.ops.config.processes import PoolReader


@command
def snapshots(
    settings: PoolReader,
    *,
    bookmark: Annotated[str, Meta(description="keep a snapshot permanently under this name")] = "",
    position: Annotated[
        int | None, Meta(description="position of the snapshot for --bookmark (default: the newest)")
    ] = None,
    drop: Annotated[str, Meta(description="delete a bookmark")] = "",
) -> int:
    """List a pool's snapshots, or bookmark one."""
    from headwater.ops.operator import snapshots as operator
    from headwater.ops.process import signals

    if bookmark and drop:
        raise ConfigError("--bookmark and --drop exclude each other: give one")
    if position is not None and not bookmark:
        raise ConfigError("--position is for --bookmark: give both")
    return signals.run_command(
        lambda: operator.snapshots(
            settings.nats, settings.pool, bookmark=bookmark, position=position, drop=drop
        )
    )
