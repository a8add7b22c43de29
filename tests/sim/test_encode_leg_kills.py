"""kill -9 of each party at each state of a request with images: one right answer, or one clear error, and nothing pinned.

The table of `STATES` and `PARTS` of `tests/sim/encode_leg.py`, in a fleet that encodes, prefills and decodes apart.
"""

import asyncio
import random
from typing import Final, NamedTuple

import pytest
from msgspec import structs

from headwater.actors.worker.encoding import OFFER_S
from headwater.actors.worker.handoffs import CHECK_PERIOD_S, GONE_S
from headwater.engines.transfer.slab import CLAIM_S, QUARANTINE_S
from headwater.events.ports import Record
from headwater.ops.sim import checks, clients, fleet, loop
from headwater.ops.sim.clients import ClientEvent, Clients
from headwater.ops.sim.fleet import SimFleet, names
from headwater.ops.sim.loop import VirtualLoop
from headwater.router.encode_leg import WAIT_S_UNKNOWN
from headwater.schemas.events import RequestEnded, Role
from tests.sim.disaggregated import JOINED_S, serving
from tests.sim.encode_leg import BEFORE_THE_ANSWER, PARTS, STATES, EncodeLegWatch, State
from tests.support.marks import grid
from tests.support.worlds.virtual import virtual

ENGINES: Final = ["prefill-0", "prefill-1", "decode-0", "decode-1"]
ROLES: Final[tuple[Role, ...]] = ("prefill", "prefill", "decode", "decode")
REQUESTS: Final = 3
RESTART_S: Final = 1.0
ENDLESS: Final = (1_000, 1_000)
"""Tokens of answers that take longer than anything here."""

ORPHANS_END_S: Final = GONE_S + 3 * CHECK_PERIOD_S
PINS_END_S: Final = OFFER_S + CLAIM_S + QUARANTINE_S
EDGE_DIED: Final = "the edge that served it died"


class Outcome(NamedTuple):
    """What the clients were sent, what is wrong, how the killed edge's requests ended, and where the kill landed."""

    told: list[ClientEvent]
    problems: list[str]
    errors: list[str]
    watch: EncodeLegWatch


async def _run(clock: VirtualLoop, patch: pytest.MonkeyPatch, state: State, victim: str) -> Outcome:
    watch = EncodeLegWatch(patch, state, victim)
    draw = random.Random(f"{state} {victim}")
    up = SimFleet(
        clock, draw, watch.seen, ENGINES, ["router-0"], ["edge-0"], ROLES, encoders=names("encode", 2)
    )
    sender = Clients(clock, up, draw, images=draw)
    doomed: asyncio.Future[str] = clock.create_future()
    watch.on_strike = doomed.set_result
    problems: list[str] = []

    async def replace() -> None:
        # A task of nobody's: one of the killed process would end with it.
        name = await doomed
        up.stuck += await up.processes[name].kill()
        if victim == "edge":
            await asyncio.sleep(ORPHANS_END_S)
            problems.extend(_unfinished(up))
        else:
            await asyncio.sleep(RESTART_S)
        up.start(name)
        await asyncio.sleep(JOINED_S)

    async with serving(up):
        lives = dict(up.processes)
        watch.fleet = up
        replaced = clock.create_task(replace())
        told = await asyncio.gather(*(sender.send("edge-0", patient=True) for _ in range(REQUESTS)))
        await asyncio.wait({replaced}, timeout=60.0)
        patch.setattr(clients, "LONG_SHARE", 0.0)
        again = await sender.send("edge-0", patient=True)
        problems += checks.streams([*told, again])
        problems += [f"afterwards: {again.end}"] if again.end != "stop" else []
        struck = watch.struck
        died = {name for name, process in lives.items() if up.processes[name] is not process}
        if struck is None or died != {struck.victim} or not replaced.done():
            problems.append(f"killed was {struck}, and ended have {died}")
        deadline = clock.time() + PINS_END_S
        while (pinned := _pinned(up)) and clock.time() < deadline:
            await asyncio.sleep(1.0)
        problems += pinned
        await up.stop()
        problems += checks.leaks(up)
        problems += checks.handoffs(up)
        problems += await checks.lease_leaks(up)
        found = await checks.messages(up.store.requests)
        problems += checks.terminal_events(found)
        problems += checks.encode_legs(found)
        ends = [event for one in found if isinstance(one, Record) for event in one.batch.events]
        errors = [event.error for event in ends if isinstance(event, RequestEnded) and event.error]
    return Outcome(told, [*problems, *up.unexpected, *clock.failures], errors, watch)


def _unfinished(up: SimFleet) -> list[str]:
    """Requests that engines and workers still have."""
    found = []
    for name in ENGINES:
        running, waiting, *_ = up.sim_engines[name].load()
        if running or waiting or len(up.worker(name).inflight):
            found.append(f"{name} has {running} running and {waiting} waiting requests that nobody reads")
    return found


def _pinned(up: SimFleet) -> list[str]:
    """What is still held for others in a fleet that serves nothing, when all leases have ended."""
    found = [*_unfinished(up), *up.transfers.leaks(), *checks.handoffs(up)]
    found += [f"{name} has hand-offs" for name in ENGINES if up.worker(name).inflight.handoffs]
    found += [f"{name} encodes" for name in up.encoders if len(up.worker(name).inflight)]
    found += [f"{name} pins embeddings" for name in ENGINES if up.sim_engines[name]._images.pinned]
    return found


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request has images, and is prefilled on one worker and decoded on another."""
    monkeypatch.setattr(fleet, "WEIGHTS", structs.replace(fleet.WEIGHTS, apart=True, local_tokens=0))
    monkeypatch.setattr(clients, "IMAGE_SHARE", 1.0)


@pytest.mark.parametrize(("state", "victim"), grid(STATES, PARTS, 2))
def test_a_kill_in_any_state_costs_no_wrong_answer(
    monkeypatch: pytest.MonkeyPatch, state: State, victim: str
) -> None:
    """Every client has its whole answer. Only the edge's own death cuts its requests, whose engines then stop."""
    if victim == "edge":
        monkeypatch.setattr(clients, "LONG_SHARE", 1.0)
        monkeypatch.setattr(clients, "LONG_ANSWER_TOKENS", ENDLESS)
    told, problems, errors, watch = loop.run(lambda clock: _run(clock, monkeypatch, state, victim))
    assert watch.struck is not None, f"no request came to {state}"
    assert watch.struck.victim.startswith(victim)
    assert problems == []
    if state in BEFORE_THE_ANSWER:
        assert watch.struck.legs_open > 0, "the encode leg had ended"
    ends = [one.end for one in told]
    if victim == "edge":
        assert ends == ["reset"] * REQUESTS
        assert set(errors) <= {EDGE_DIED}
    else:
        assert ends == ["stop"] * REQUESTS
        assert errors == []


# How long a request waits for encode workers that do not answer: simulated fleets whose encode workers are stopped, as by SIGSTOP.


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
