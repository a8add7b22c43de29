"""kill -9 of each party at each state of a request's saga: one right answer, or one clear error, and nothing pinned."""

import asyncio
import random
from collections.abc import Callable
from itertools import product

import pytest

from headwater.actors.edge.saga import driver
from headwater.actors.edge.saga.saga import step
from headwater.actors.edge.saga.types import Effect, Saga, SagaEvent
from headwater.ops.sim import checks, loop
from headwater.ops.sim.clients import ClientEvent, Clients
from headwater.ops.sim.fleet import SimFleet
from headwater.ops.sim.loop import VirtualLoop
from headwater.schemas.events import Role, SagaState
from headwater.schemas.inference import Choreography
from tests.sim.disaggregated import serving
from tests.support.marks import grid

ENGINES = ["prefill-0", "prefill-1", "decode-0", "decode-1"]
ROLES: tuple[Role, ...] = ("prefill", "prefill", "decode", "decode")
CHOREOGRAPHIES: tuple[Choreography, ...] = ("returned", "room", "opaque")
STATES: tuple[SagaState, ...] = ("routing", "prefill", "handoff", "decode")
REQUESTS = 6
RECOVERED_S = 5.0
PINS_END_S = 30.0

Victim = Callable[[Saga], str]

VICTIMS: dict[str, Victim] = {
    "prefill worker": lambda saga: _part(saga, "prefill"),
    "decode worker": lambda saga: _part(saga, "decode"),
    "router": lambda _: "router-0",
    "edge": lambda _: "edge-0",
}


def _part(saga: Saga, role: str) -> str:
    """The worker of this role that the saga is with, else the first one."""
    named = [saga.attempt.worker, saga.holder.worker if saga.holder else ""]
    return next((name for name in named if name.startswith(role)), f"{role}-0")


class Watch:
    """Calls `strike` once, when the first saga has come to `state`: where it searches for a worker, has named one."""

    def __init__(self, patch: pytest.MonkeyPatch, state: SagaState, strike: Callable[[Saga], None]) -> None:
        self.struck = False

        def watched(before: Saga, event: SagaEvent) -> tuple[Saga, list[Effect]]:
            saga, effects = step(before, event)
            arrived = before.state != state or (
                saga.attempt.number != before.attempt.number and saga.streaming
            )
            if saga.state == state and arrived and (state != "routing" or saga.streaming) and not self.struck:
                self.struck = True
                strike(saga)
            return saga, effects

        patch.setattr(driver, "step", watched)


async def _run(
    clock: VirtualLoop, patch: pytest.MonkeyPatch, state: SagaState, victim: Victim, how: Choreography
) -> tuple[list[ClientEvent], list[str], bool]:
    draw = random.Random(f"{state} {how}")
    fleet = SimFleet(clock, draw, lambda *_: None, ENGINES, ["router-0"], ["edge-0"], ROLES, how)
    clients = Clients(clock, fleet, draw)
    doomed: asyncio.Future[str] = clock.create_future()

    async def kill() -> None:
        # A task of nobody's: one that the edge had started would die with it.
        name = await doomed
        await fleet.kill(name)
        await asyncio.sleep(1.0)
        fleet.start(name)

    problems: list[str] = []
    async with serving(fleet):
        killing = clock.create_task(kill())
        watch = Watch(patch, state, lambda saga: doomed.set_result(victim(saga)))
        told = await asyncio.gather(*(clients.send("edge-0", patient=True) for _ in range(REQUESTS)))
        await asyncio.wait({killing}, timeout=30.0)
        await asyncio.sleep(RECOVERED_S)
        # The pins of a killed worker's partner end with their leases.
        deadline = clock.time() + PINS_END_S
        while fleet.fabric.pins and clock.time() < deadline:
            await asyncio.sleep(0.5)
        again = await clients.send("edge-0", patient=True)
        problems += checks.streams([*told, again])
        await fleet.stop()
        problems += checks.leaks(fleet)
        problems += checks.handoffs(fleet)
        problems += checks.terminal_events(await checks.messages(fleet.store.requests))
    problems += [*fleet.unexpected, *clock.failures]
    if again.end != "stop":
        problems.append(f"afterwards: {again.end}")
    return told, problems, watch.struck


@pytest.mark.parametrize(("state", "victim", "how"), grid(list(product(STATES, VICTIMS)), CHOREOGRAPHIES, 1))
def test_a_kill_in_any_state_costs_no_wrong_answer(
    monkeypatch: pytest.MonkeyPatch, state: SagaState, victim: str, how: Choreography
) -> None:
    """Every client has its whole answer; only the edge's own death may cut it, and then it is cut, not wrong."""
    told, problems, struck = loop.run(lambda clock: _run(clock, monkeypatch, state, VICTIMS[victim], how))
    assert struck, f"no request came to {state}"
    assert problems == []
    ends = [one.end for one in told]
    if victim == "edge":
        assert set(ends) <= {"stop", "reset", "error", "refused"}
    else:
        assert ends == ["stop"] * REQUESTS
