"""Many simulated workers in one process, each with its own lease, connections and reports: a large fleet for a router on a small machine.

`python -m headwater.ops.bench.route.worker_host URL NAMESPACE COUNT` joins them to the fleet on that server, until it is ended.
"""

import asyncio
import sys

from headwater.actors.runtime.actor import Actor
from headwater.actors.runtime.ports import Ports
from headwater.actors.worker.actor import WorkerActor
from headwater.actors.worker.lifecycle.model_card import Served
from headwater.actors.worker.serving.status import WorkerProfile
from headwater.engines.sim.engine import SimEngine, SimSettings
from headwater.engines.sim.model import sim_model_files
from headwater.engines.sim.step_time import ZERO
from headwater.ops.config.nats import NatsSettings
from headwater.ops.config.process import MetricsSettings
from headwater.ops.process import logging, signals
from headwater.ops.process.actor import Host, run_one
from headwater.ops.process.signals import die_with_parent
from headwater.schemas.clock import SystemClock

NAME = "hosted-"
"""Workers are named so, with a number."""

AT_ONCE = 16
"""Workers that join at the same time: joining takes CPU, and a lease that is not renewed in time ends."""


async def host_workers(nats: NatsSettings, settings: SimSettings, count: int, stop: asyncio.Event) -> int:
    """Run `count` workers until stopped; returns the worst exit status."""
    served = Served(settings.model, sim_model_files(settings.model))
    joining = asyncio.Semaphore(AT_ONCE)

    async def host_one(name: str) -> int:
        async with joining:
            joined = asyncio.Event()

            async def make(ports: Ports) -> Actor:
                engine = SimEngine(settings, SystemClock())
                joined.set()
                return WorkerActor(ports, name, engine, served, profile=WorkerProfile(instance=name))

            running = asyncio.create_task(
                run_one(Host(nats, MetricsSettings()), "worker", name, make, stop, restarts=False)
            )
            waiting = asyncio.create_task(joined.wait())
            await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
        return await running

    return max(await asyncio.gather(*(host_one(f"{NAME}{number}") for number in range(count))))


def main(url: str, namespace: str, count: int) -> int:
    """Run `count` workers of the simulated model until SIGTERM."""
    die_with_parent()
    logging.configure("error")
    nats = NatsSettings(url, namespace=namespace)
    settings = SimSettings(step_time=ZERO)
    return signals.run(lambda stop: host_workers(nats, settings, count, stop))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
