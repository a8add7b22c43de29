"""How long a request waits for encode workers that do not answer: simulated fleets whose encode workers are stopped, as by SIGSTOP."""

import random
from typing import Final

import pytest
from msgspec import structs

from headwater.ops.sim import checks, clients, fleet
from headwater.ops.sim.clients import Clients
from headwater.ops.sim.fleet import SimFleet, names
from headwater.ops.sim.loop import VirtualLoop
from headwater.router.encode_leg import WAIT_S_UNKNOWN
from headwater.schemas.events import Role
from tests.sim.disaggregated import serving
from tests.support.worlds.virtual import virtual

ANSWER_S: Final = 4.0
"""That an answer of the simulated fleet takes, images and their encoding included."""


@pytest.mark.parametrize("encoders", [1, 2])
@virtual
async def test_a_stopped_encode_worker_delays_the_first_token_by_a_bounded_time(
    clock: VirtualLoop, monkeypatch: pytest.MonkeyPatch, encoders: int
) -> None:
    """Whether one or all are stopped, at most by what an embedding is awaited for without measurements. It was 20 s for each of two tries."""
    monkeypatch.setattr(fleet, "WEIGHTS", structs.replace(fleet.WEIGHTS, apart=True, local_tokens=0))
    for name, share in (("IMAGE_SHARE", 1.0), ("LONG_SHARE", 0.0), ("HANG_UP_SHARE", 0.0)):
        monkeypatch.setattr(clients, name, share)
    draw = random.Random(7)
    roles: tuple[Role, ...] = ("prefill", "decode")
    apart, found = ["prefill-0", "decode-0"], names("encode", encoders)
    up = SimFleet(clock, draw, lambda *_: None, apart, ["router-0"], ["edge-0"], roles, encoders=found)
    sender = Clients(clock, up, draw, images=draw)
    async with serving(up):
        for name in up.encoders:
            up.processes[name].group.pause()
        began_s = clock.time()
        told = await sender.send("edge-0", patient=True)
        took_s = clock.time() - began_s
        problems = list(checks.streams([told]))
    assert (told.end, problems) == ("stop", [])
    assert took_s < WAIT_S_UNKNOWN + ANSWER_S < 10
