"""The processes of an engine die, hang or lie while its worker's process lives on: every way, under streams, in every role.

Each client has the whole answer of an undisturbed run. A request never runs twice on an incarnation that died with it, whatever
the router still says of that one, and waits for the next incarnation where there is no other worker.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec
import pytest
from msgspec import structs

from headwater.actors.runtime.lease import TTL_S
from headwater.actors.worker.settings import HealthSettings
from headwater.events.ports import Record
from headwater.ops.sim import fleet
from headwater.ops.sim.checks import messages
from headwater.ops.sim.fleet import SimFleet
from headwater.ops.sim.loop import VirtualLoop
from headwater.schemas.events import RequestRouted, Role
from headwater.schemas.inference import Choreography
from tests.sim.disaggregated import EDGE, answer, ask, fleet_of
from tests.sim.test_saga_kills import Watch
from tests.support.engines.mortal import MortalSim, Way
from tests.support.marks import grid
from tests.support.worlds.virtual import virtual

CAUSE: Final = "CUDA error: an illegal memory access"
STREAMS: Final = 6
TOKENS: Final = 150
RESTART_S: Final = 25.0
"""How long a real engine takes to be back."""

KNOWN_S_MAX: Final = TTL_S + 3.0
"""Until all know that a killed worker is gone: its lease lapses."""

QUICK: Final = HealthSettings()._replace(stuck_s=20.0)

BEGUN_S: Final = 1.0
"""Into the streams: all have tokens, none is done."""

WAYS: tuple[Way, ...] = ("killed", "killed in silence", "broken by a request")


class Fleet(NamedTuple):
    """Workers by role, which of them is hurt ("": the busiest), and how long its next incarnation takes to start."""

    roles: tuple[Role, ...]
    victim: str
    how: Choreography = "returned"
    restart_s: float = RESTART_S


FLEETS: dict[str, Fleet] = {
    "one of two": Fleet(("both", "both"), ""),
    "the only one": Fleet(("both",), "both-0"),
    "the prefill worker": Fleet(("prefill", "decode"), "prefill-0"),
    "the decode worker": Fleet(("prefill", "decode"), "decode-1"),
    # Nobody else takes a new prompt, which is refused sooner than one that has begun.
    "the prefill worker of a room": Fleet(("prefill", "decode"), "prefill-0", "room", 5.0),
    "the decode worker of a room": Fleet(("prefill", "decode"), "decode-1", "room"),
    "one of two decode workers": Fleet(("prefill", "decode", "decode"), "decode-1"),
    "one of two prefill workers": Fleet(("prefill", "prefill", "decode"), "prefill-0"),
}


@pytest.fixture(autouse=True)
def mortal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fleets of engines that may die, and that hand over every prompt where they can."""
    monkeypatch.setattr(fleet, "SimEngine", MortalSim)
    monkeypatch.setattr(fleet, "WEIGHTS", structs.replace(fleet.WEIGHTS, apart=True, local_tokens=0))


def prompt(number: int) -> list[int]:
    """Prompts with a common beginning: the router has a reason to come back."""
    return [1] * 32 + [number] * 20


def engine(up: SimFleet, name: str) -> MortalSim:
    """The present engine of a worker."""
    found = up.sim_engines[name]
    assert isinstance(found, MortalSim)
    return found


def victim(up: SimFleet, wanted: str) -> str:
    """The worker to hurt: the one that is named, or the busiest."""
    return wanted or max(up.engines, key=lambda name: engine(up, name).load().running)


async def texts(up: SimFleet) -> list[Any]:
    """All answers, at once."""
    found = await asyncio.gather(*(ask(up, prompt(number), TOKENS) for number in range(STREAMS)))
    return [one["choices"][0]["text"] if "choices" in one else one for one in found]


async def run_twice(up: SimFleet, incarnation: tuple[str, int]) -> list[str]:
    """The requests that an incarnation of a worker accepted the same leg of more than once."""
    found = [one for one in await messages(up.store.requests) if isinstance(one, Record)]
    accepted = Counter(
        f"{one.request} {one.leg}"
        for record in found
        for one in record.batch.events
        if isinstance(one, RequestRouted) and (one.worker, one.epoch) == incarnation
    )
    return [leg for leg, times in accepted.items() if times > 1]


async def disturbed(up: SimFleet, name: str, hurt: Callable[[MortalSim], None]) -> list[Any]:
    """The answers of streams whose engine is hurt while they run."""
    asked = asyncio.ensure_future(texts(up))
    await asyncio.sleep(0.0 if name.startswith("prefill") else BEGUN_S)
    doomed = engine(up, victim(up, name))
    while not doomed.busy:
        await asyncio.sleep(0.001)
    hurt(doomed)
    return await asked


@pytest.mark.parametrize(("which", "way"), grid(list(FLEETS), WAYS, 1))
@virtual
async def test_a_dead_engine_costs_no_stream(
    clock: VirtualLoop, monkeypatch: pytest.MonkeyPatch, which: str, way: Way
) -> None:
    """No answer is lost or changed, and nothing runs twice on the incarnation that died."""
    wanted = FLEETS[which]
    async with fleet_of(clock, wanted.how, wanted.roles) as up:
        expected = await texts(up)
        assert all(isinstance(text, str) for text in expected), expected
        died: list[tuple[str, int]] = []

        def hurt(doomed: MortalSim) -> None:
            [name] = [name for name in up.engines if engine(up, name) is doomed]
            died.append((name, up.worker(name).epoch))
            doomed.end(way, CAUSE)

        # From now on engines start as slowly as real ones.
        monkeypatch.setattr(MortalSim, "start_s", wanted.restart_s)
        assert await disturbed(up, wanted.victim, hurt) == expected
        # One that dies in silence is not known to be dead before its worker asks.
        assert way == "killed in silence" or await run_twice(up, died[0]) == []


@pytest.mark.parametrize("which", ["one of two", "the only one"])
@virtual
async def test_requests_that_come_to_a_dead_engine_run_elsewhere_or_later(
    clock: VirtualLoop, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """It was idle when it died, so that the next request is the first to tell."""
    wanted = FLEETS[which]
    async with fleet_of(clock, wanted.how, wanted.roles) as up:
        expected = await texts(up)
        monkeypatch.setattr(MortalSim, "start_s", 5.0)
        died = "both-0", up.worker("both-0").epoch
        engine(up, "both-0").end("killed", CAUSE)
        assert await texts(up) == expected
        assert await run_twice(up, died) == []


@virtual
async def test_an_engine_that_fails_every_request_keeps_none_from_another_worker(clock: VirtualLoop) -> None:
    """It is idle and knows the prompts, so the router prefers it: a request that failed there goes elsewhere."""
    async with fleet_of(clock, roles=("both", "both")) as up:
        expected = await texts(up)
        found = await disturbed(up, "", lambda one: one.end("failing", CAUSE))
        assert found == expected
        again = await texts(up)
        assert again == expected


@virtual
async def test_streams_of_a_stopped_engine_move_once_it_counts_as_stuck(
    clock: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing tells it from a slow one before."""
    monkeypatch.setattr("headwater.actors.worker.actor.HealthSettings", lambda: QUICK)
    async with fleet_of(clock, roles=("both", "both")) as up:
        expected = await texts(up)
        began_s = clock.time()
        found = await disturbed(up, "", lambda one: one.end("stopped", CAUSE))
        assert found == expected
        assert QUICK.stuck_s < clock.time() - began_s < QUICK.stuck_s + 15.0


@pytest.mark.parametrize("way", ["killed", "stopped"])
@pytest.mark.parametrize("roles", [("both", "both"), ("both",)], ids=["one of two", "the only one"])
@virtual
async def test_a_dead_engine_costs_no_vector(
    clock: VirtualLoop, monkeypatch: pytest.MonkeyPatch, roles: tuple[Role, ...], way: Way
) -> None:
    """Pooling keeps no state: what ran on it runs elsewhere, or later, as with generation."""
    monkeypatch.setattr("headwater.actors.worker.actor.HealthSettings", lambda: QUICK)
    async with fleet_of(clock, roles=roles) as up:
        body = {"model": "sim", "input": [prompt(number) * 10 for number in range(4)]}
        expected = await vectors(up, body)
        monkeypatch.setattr(MortalSim, "start_s", RESTART_S)
        asked = asyncio.ensure_future(vectors(up, body))
        while not (busy := [engine(up, name) for name in up.engines if engine(up, name).pools]):
            await asyncio.sleep(0.001)
        busy[0].end(way, CAUSE)
        assert await asked == expected


async def vectors(up: SimFleet, body: dict[str, Any]) -> Any:
    """Of the prompts of a request."""
    document = await answer(up.servers[EDGE].connect("/v1/embeddings", msgspec.json.encode(body), []))
    return document.get("data", document)


@pytest.mark.parametrize("how", ["returned", "opaque"])
@virtual
async def test_a_prefilled_prompt_does_not_wait_for_a_decode_worker_that_is_gone(
    clock: VirtualLoop, monkeypatch: pytest.MonkeyPatch, how: Choreography
) -> None:
    """Once no decode worker is left the prefill worker serves the whole of it, and does not wait for the end of its KV's lease."""
    async with fleet_of(clock, how) as up:
        expected = await texts(up)
        struck: asyncio.Future[float] = clock.create_future()

        async def kill() -> None:
            # A task of nobody's: one that the edge had started would be the edge's.
            await struck
            await up.kill("decode-1")

        killing = clock.create_task(kill())
        Watch(monkeypatch, "handoff", lambda _: struck.set_result(clock.time()))
        assert await texts(up) == expected
        took_s = clock.time() - struck.result()
        await killing
        # With the routers told, a new prompt is not handed over at all.
        began_s = clock.time()
        assert await texts(up) == expected
        assert took_s < clock.time() - began_s + KNOWN_S_MAX
