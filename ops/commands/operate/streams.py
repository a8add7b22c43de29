"""`headwater streams`: every stream of a namespace."""

from typing import Annotated

from msgspec import Meta

from headwater.ops.config.command import command
from headwater.ops.config.processes import StreamOperator
from headwater.ops.config.setting import Flag


@command
def streams(
    settings: StreamOperator,
    *,
    repair: Annotated[bool, Meta(description="create and alter streams where nothing is lost by it")] = False,
    as_json: Annotated[bool, Flag("json"), Meta(description="print JSON")] = False,
) -> int:
    """List all streams of the namespace: size, health, and differences from their wanted configuration."""
    from headwater.ops.operator import streams as operator
    from headwater.ops.process import signals

    return signals.run_command(
        lambda: operator.streams(settings.nats, settings.streams, repair=repair, as_json=as_json)
    )
