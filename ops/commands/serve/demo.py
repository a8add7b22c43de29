"""`headwater demo`: a fleet that answers three questions."""

import sys
import tempfile

from headwater.ops.config.command import command
from headwater.ops.config.engine import checked
from headwater.ops.config.processes import LocalFleetSettings


@command(defaults={"data_dir": "", "nats.port": 0, "http.port": 0, "log.level": "warning"})
def demo(settings: LocalFleetSettings) -> int:
    """Start a fleet, ask three questions, show where they were routed and why.

    It has its own NATS server, ports and data folder, so that it does not affect a running fleet.
    """
    from headwater.ops.fleet import demo as demonstration
    from headwater.ops.process import signals
    from headwater.ops.worker import environment

    settings = checked(settings)
    if not settings.data_dir:
        settings = settings._replace(data_dir=tempfile.mkdtemp(prefix="headwater-demo-"))
    if settings.worker.engine == "vllm":
        environment.enter("vllm", sys.argv[1:])
    return signals.run(lambda stop: demonstration.demo(settings, stop))
