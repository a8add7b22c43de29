"""The data-parallel ranks of one engine in one process: a worker for each, that live and end together."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeGuard

from headwater.actors.runtime.actor import Actor
from headwater.actors.runtime.ports import Ports
from headwater.engines.data_parallel import RankedEngine, split
from headwater.engines.engine import Engine
from headwater.ops.process.actor import EXIT_UNRECOVERABLE, Host

Run = Callable[..., Awaitable[int]]
"""`run_actor`'s way to run one actor with ports of its own: settings, kind, name, make, stop, restarts."""

Make = Callable[[Ports, str, Engine], Awaitable[Actor]]
"""Makes the worker of one rank: its ports, its name, its engine."""


def has_ranks(engine: Engine) -> TypeGuard[RankedEngine]:
    """Is it an engine of several ranks?"""
    return getattr(engine, "ranks", 1) > 1


def rank_name(worker: str, number: int) -> str:
    """Name of the worker that stands for one rank."""
    return f"{worker}-dp{number}"


async def run_ranks(
    host: Host, worker: str, engine: RankedEngine, make: Make, stop: asyncio.Event, run: Run
) -> int:
    """All ranks until stopped, or until one of them ends: then the others end too, as their engine is the same.

    Each has a connection, a lease and a name of its own; `make` gives it the worker's name as its instance. Returns
    the exit status, the worst of them.
    """
    ending = asyncio.Event()

    async def one(number: int, rank: Engine) -> int:
        name = rank_name(worker, number)
        # One server of metrics for the process.
        own = host if number == 0 else host._replace(metrics=host.metrics._replace(port=0))

        async def make_it(ports: Ports) -> Actor:
            return await make(ports, name, rank)

        try:
            return await run(own, "worker", name, make_it, ending, restarts=False)
        finally:
            ending.set()

    async def pass_on() -> None:
        await stop.wait()
        ending.set()

    watcher: asyncio.Task[Any] = asyncio.create_task(pass_on(), name="stop watcher")
    try:
        async with asyncio.TaskGroup() as group:
            ranks = [
                group.create_task(one(*pair), name=rank_name(worker, pair[0]))
                for pair in enumerate(split(engine))
            ]
    finally:
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher
    codes = [task.result() for task in ranks]
    return EXIT_UNRECOVERABLE if EXIT_UNRECOVERABLE in codes else max(codes)
