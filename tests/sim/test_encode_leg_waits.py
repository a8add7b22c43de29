"""How long a request waits for encode workers that do not answer: simulated fleets whose encode workers are stopped, as by SIGSTOP."""

import asyncio
import random
from typing import Final

import pytest
from msgspec import structs

from headwater.ops.sim import checks, clients, fleet, loop
from headwater.ops.sim.clients import Clients
from headwater.ops.sim.fleet import SimFleet, names
from headwater.ops.sim.loop import VirtualLoop
from headwater.router.decision.encode_leg import WAIT_S_UNKNOWN

JOINED_S: Final = 2.0
ANSWER_S: Final = 4.0
"""That an answer of the simulated fleet takes, images and their encoding included."""


@pytest.mark.parametrize("encoders", [1, 2])
def test_a_stopped_encode_worker_delays_the_first_token_by_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch, encoders: int
) -> None:
    """Whether one or all are stopped, at most by what an embedding is awaited for without measurements. It was 20 s for each of two tries."""
    monkeypatch.setattr(fleet, "WEIGHTS", structs.replace(fleet.WEIGHTS, apart=True, local_tokens=0))
    monkeypatch.setattr(clients, "IMAGE_SHARE", 1.0)
    monkeypatch.setattr(clients, "LONG_SHARE", 0.0)
    monkeypatch.setattr(clients, "HANG_UP_SHARE", 0.0)

    async def run(clock: VirtualLoop) -> tuple[str, float, list[str]]:
        draw = random.Random(7)
        engines = ["prefill-0", "decode-0"]
        up = SimFleet(
            clock,
            draw,
            lambda *_: None,
            engines,
            ["router-0"],
            ["edge-0"],
            ("prefill", "decode"),
            encoders=names("encode", encoders),
        )
        sender = Clients(clock, up, draw, images=draw)
        try:
            for name in up.names:
                up.start(name)
            await asyncio.sleep(JOINED_S)
            for name in up.encoders:
                up.processes[name].group.pause()
            began_s = clock.time()
            told = await sender.send("edge-0", patient=True)
            took_s = clock.time() - began_s
            return told.end, took_s, list(checks.streams([told]))
        finally:
            for name in up.names:
                await up.kill(name)

    end, took_s, problems = loop.run(run)
    assert (end, problems) == ("stop", [])
    assert took_s < WAIT_S_UNKNOWN + ANSWER_S < 10
