"""`headwater engine`: the workers of one engine process."""

from typing import Annotated

from msgspec import Meta

from headwater.ops.config.command import command
from headwater.ops.config.engine import checked
from headwater.ops.config.processes import EngineProcess
from headwater.ops.config.setting import Flag


@command
def engine(
    engine_name: Annotated[
        str | None,
        Flag("ENGINE"),
        Meta(description="the same as --engine; the engine's own arguments may follow after `--`"),
    ] = None,
    /,
    *,
    settings: EngineProcess,
) -> int:
    """Run engine workers."""
    from headwater.ops.worker import start

    return start.run(checked(settings))
