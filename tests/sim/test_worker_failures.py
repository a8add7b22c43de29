"""What counts as a worker's failure, and what is known of its cause."""

import asyncio

import pytest

from headwater.engines.engine import EngineDied
from headwater.engines.sim.engine import SimEngine
from headwater.events.ports import Record
from headwater.ops.operator.explain import why_workers_left
from headwater.ops.sim import fleet
from headwater.ops.sim.checks import messages
from headwater.ops.sim.fleet import POOL
from headwater.ops.sim.loop import VirtualLoop
from headwater.schemas.events import RequestStepped, WorkerChanged, WorkerDraining, WorkerLeft
from tests.sim.disaggregated import ask, fleet_of, get
from tests.support.worlds.virtual import virtual

BAD = 300
CAUSE = "CUDA error: an illegal memory access"


@virtual
async def test_bad_requests_mark_no_worker(clock: VirtualLoop) -> None:
    """Rejected by the edge or by the engine: the workers stay as they are, and serve."""
    async with fleet_of(clock, roles=("both", "both")) as up:
        # The first is longer than a context, the second fits a context and no worker's cache.
        bad = [([1] * 3_000, 4), ([1] * 1_600, 4)]
        for number in range(BAD):
            prompt, tokens = bad[number % len(bad)]
            assert (await ask(up, prompt, tokens))["error"]["type"] == "invalid_request_error"
        assert (await get(up, "/health"))[0] == 200
        answers = await asyncio.gather(*(ask(up, [number] * 20) for number in range(8)))
        assert {answer["object"] for answer in answers} == {"text_completion"}
        found = [one for one in await messages(up.store.pool(POOL)) if isinstance(one, Record)]
        events = [event for record in found for event in record.batch.events]
        assert [one for one in events if isinstance(one, WorkerLeft | WorkerDraining)] == []
        assert {one.state for one in events if isinstance(one, WorkerChanged)} == {"ready"}


@virtual
async def test_the_first_cause_of_an_engines_death_is_kept(
    clock: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request moves, and the log has the cause for both: what `headwater explain` prints of the request."""

    class Mortal(SimEngine):
        dead = False

        async def check(self) -> None:
            if Mortal.dead and self.load().running:
                Mortal.dead = False
                raise EngineDied(CAUSE)
            await super().check()

    monkeypatch.setattr(fleet, "SimEngine", Mortal)
    async with fleet_of(clock, roles=("both", "both")) as up:
        asked = asyncio.ensure_future(ask(up, [1] * 20, 200))
        await asyncio.sleep(1.0)
        Mortal.dead = True
        assert (await asked)["usage"]["completion_tokens"] == 200
        found = [one for one in await messages(up.store.requests) if isinstance(one, Record)]
        steps = [one for record in found for one in record.batch.events if isinstance(one, RequestStepped)]
        left = {(step.worker, step.epoch) for step in steps}
        [line] = await why_workers_left(up.store.pool(POOL), left)
        assert CAUSE in line
        # Another step may follow: a router that does not know of it yet names the dead worker again.
        assert CAUSE in steps[0].reason
        assert await why_workers_left(up.store.pool(POOL), set()) == []
