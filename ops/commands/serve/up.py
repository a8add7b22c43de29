"""`headwater up`: a whole fleet on this machine."""

import sys

from headwater.ops.config.command import command
from headwater.ops.config.engine import checked
from headwater.ops.config.processes import LocalFleetSettings


@command
def up(settings: LocalFleetSettings) -> int:
    """Start a whole fleet on this machine: NATS server, router, edge and workers. vLLM's own arguments follow after `--`."""
    from headwater.ops.commands import application
    from headwater.ops.fleet import bootstrap
    from headwater.ops.fleet import up as fleet
    from headwater.ops.process import signals

    settings = checked(settings)
    if settings.worker.engine == "vllm" and bootstrap.needed():
        bootstrap.continue_with_vllm(sys.argv[1:])
    spawner = fleet.start_spawner(application.main)
    return signals.run(lambda stop: fleet.up(settings, stop, spawner))
