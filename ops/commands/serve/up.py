"""`headwater up`: a whole fleet on this machine."""

import sys

from headwater.ops.config.command import command
from headwater.ops.config.engine import checked
from headwater.ops.config.processes import LocalFleetSettings


@command
def up(settings: LocalFleetSettings) -> int:
    """Start a whole fleet on this machine: NATS server, router, edge and workers. The engine's own arguments follow after `--`."""
    from headwater.ops.commands import application
    from headwater.ops.fleet import up as fleet
    from headwater.ops.process import signals
    from headwater.ops.worker import environment

    settings = checked(settings)
    if settings.worker.engine == "vllm":
        environment.enter("vllm", sys.argv[1:])
    spawner = fleet.start_spawner(application.main)
    return signals.run(lambda stop: fleet.up(settings, stop, spawner))
