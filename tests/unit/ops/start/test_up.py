"""`headwater up` ends when it is asked to, also while it starts its fleet."""

import asyncio
from typing import Any

import pytest

from headwater.ops.config.processes import LocalFleetSettings
from headwater.ops.launch import up as module
from headwater.ops.launch.up import plan_of, up


async def test_a_fleet_that_still_starts_is_stopped_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it waits for may take minutes: a server, a model's download, an engine's environment."""
    did: list[str] = []
    begun = asyncio.Event()

    class Fleet:
        workers = ()

        def __init__(self, *_: Any, **__: Any) -> None:
            self.failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def start(self) -> None:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                did.append("start ended")

        async def ready(self) -> None:
            raise AssertionError("it never started")

        async def stop(self) -> None:
            did.append("stopped")

    monkeypatch.setattr(module, "Machine", Fleet)
    stop = asyncio.Event()
    running = asyncio.ensure_future(up(plan_of(LocalFleetSettings()), stop))
    try:
        async with asyncio.timeout(5):
            await begun.wait()
            stop.set()
            assert await running == 0
    finally:
        running.cancel()
    assert did == ["start ended", "stopped"]
