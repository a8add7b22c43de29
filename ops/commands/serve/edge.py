"""`headwater edge`: one edge."""

from headwater.ops.config.command import command
from headwater.ops.config.processes import EdgeProcess


@command
def edge(settings: EdgeProcess) -> int:
    """Run one edge: an OpenAI-compatible HTTP endpoint."""
    from headwater.ops.process import edge as process
    from headwater.ops.process import signals

    return signals.run(lambda stop: process.run_edge(settings, stop))
