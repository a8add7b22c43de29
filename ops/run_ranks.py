"""The data-parallel ranks of one engine in one process: a worker for each, that live and end together."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeGuard

import msgspec

from headwater.actors.actor import Actor
from headwater.actors.world import World
from headwater.engines.engine import Engine
from headwater.engines.ranks import RankedEngine, split
from headwater.ops.children import HOPELESS
from headwater.ops.config import Settings

Run = Callable[..., Awaitable[int]]
"""`run_actor`'s way to run one actor in a world of its own: settings, kind, name, make, stop, restarts."""

Make = Callable[[World, str, Engine], Awaitable[Actor]]
"""Makes the worker of one rank: its world, its name, its engine."""


def has_ranks(engine: Engine) -> TypeGuard[RankedEngine]:
    """Is it an engine of several ranks?"""
    return getattr(engine, "ranks", 1) > 1


def rank_name(worker: str, number: int) -> str:
    """Name of the worker that stands for one rank."""
    return f"{worker}-dp{number}"


async def run_ranks(
    settings: Settings, worker: str, engine: RankedEngine, make: Make, stop: asyncio.Event, run: Run
) -> int:
    """All ranks until stopped, or until one of them ends: then the others end too, as their engine is the same.

    Each has a connection, a lease and a name of its own; `make` gives it the worker's name as its instance. Returns
    the exit status, the worst of them.
    """
    ending = asyncio.Event()

    async def one(number: int, rank: Engine) -> int:
        name = rank_name(worker, number)
        # One server of metrics for the process.
        own = settings if number == 0 else msgspec.structs.replace(settings, metrics_port=0)

        async def make_it(world: World) -> Actor:
            return await make(world, name, rank)

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
    return HOPELESS if HOPELESS in codes else max(codes)
