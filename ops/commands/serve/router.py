"""`headwater router`: one router."""

from headwater.ops.config.command import command
from headwater.ops.config.processes import RouterProcess


@command
def router(settings: RouterProcess) -> int:
    """Run one router. Without --pool it waits for the first model card."""
    from headwater.ops.process import routers, signals

    return signals.run(lambda stop: routers.run_router(settings, stop))
