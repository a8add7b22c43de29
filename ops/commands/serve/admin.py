"""`headwater admin`: the admin port."""

from headwater.ops.config.command import command
from headwater.ops.config.processes import AdminProcess


@command
def admin(settings: AdminProcess) -> int:
    """Run the admin port: control of workers over HTTP."""
    from headwater.ops.process import admin as process
    from headwater.ops.process import signals

    return signals.run(lambda stop: process.admin(settings, stop))
