"""`headwater log`: a summary of a pool's log."""

from typing import Annotated

from msgspec import Meta

from headwater.ops.config.command import command
from headwater.ops.config.errors import ConfigError
from headwater.ops.config.processes import PoolReader
from headwater.ops.config.setting import Flag


@command
def log(
    settings: PoolReader,
    *,
    requests: Annotated[bool, Meta(description="summarise the request log instead")] = False,
    audit: Annotated[bool, Meta(description="list control commands and their senders instead")] = False,
    as_json: Annotated[
        bool, Flag("json"), Meta(description="print JSON (with --audit: one line each)")
    ] = False,
) -> int:
    """Summarise a pool's log: events by type and writer."""
    from headwater.ops.operator import log as operator
    from headwater.ops.process import signals

    if as_json and not audit:
        raise ConfigError("--json is for --audit: give both")
    return signals.run_command(
        lambda: operator.show_log(
            settings.nats, settings.pool, audit=audit, requests=requests, as_json=as_json
        )
    )
