"""Whether an engine works at all: the canary and the warm-up before its worker is registered."""

import asyncio
from typing import Any

import pytest

from headwater.actors.worker.settings import WorkerProfile
from headwater.engines.engine import EmitFile, EngineError, EngineInfo, Step
from headwater.engines.sim.engine import SimEngine
from headwater.ops.sim.fleet import POOL
from headwater.schemas import subjects
from headwater.schemas.events import BlocksStored, LoadReported, Role, WorkerJoined
from headwater.schemas.inference import EmbedRequest, ImageRequest
from tests.support.data.pictures import SUPPORT
from tests.support.engines.controlled import ControlledSim, SilentSim
from tests.support.worlds.control import ready, start
from tests.support.worlds.health import QUICK, lease_of
from tests.support.worlds.virtual import Stage, events_of, staged, until


@staged
async def test_an_engine_that_answers_leaves_no_trace_of_its_canary(stage: Stage) -> None:
    """Neither blocks nor load nor a request in the log, now or later; and it is asked before it is announced."""
    worker = await ready(stage, health=QUICK)
    [canary] = worker.engine.asked
    assert canary.sampling.max_tokens == 1
    assert worker.engine.calls == ["clear-kv"]
    await asyncio.sleep(65.0)
    assert len(worker.engine.asked) > 5, "probed while idle"
    records = await stage.records()
    assert events_of(records, BlocksStored) == []
    loads = events_of(records, LoadReported)
    assert len(loads) > 50
    assert {(one.running, one.waiting, one.used_blocks) for one in loads} == {(0, 0, 0)}
    assert {(*one.accepted, *one.prefilled, *one.finished) for one in loads} == {()}


@staged
async def test_a_canary_that_takes_long_is_no_load(stage: Stage) -> None:
    """It runs for seconds, over several reports: routers are told of an idle worker all the same."""
    worker = await ready(stage, health=QUICK)
    worker.engine.hang()
    await until(lambda: worker.actor.health.probing, 15.0)
    assert worker.engine.load().running == 1
    await asyncio.sleep(3.0)
    worker.engine.stopping.go.set()
    await asyncio.sleep(3.0)
    loads = events_of(await stage.records(), LoadReported)
    assert {(one.running, one.waiting, one.used_blocks) for one in loads} == {(0, 0, 0)}
    assert worker.ended is None


@staged
async def test_an_engine_that_does_not_answer_is_never_registered(stage: Stage) -> None:
    """No card, no lease, no event: it ends with a reason, and may be started again."""
    worker = await start(stage, make=SilentSim, health=QUICK)
    took = await until(lambda: worker.ended is not None, 20.0)
    assert 5.0 <= took < 7.0
    assert worker.ended is not None
    assert "did not answer a request of one token within 5 s" in worker.ended
    assert not worker.actor.unrecoverable
    assert await lease_of(stage) is None
    assert await stage.records() == []
    assert await stage.fleet.store.cards.get(subjects.card_key(POOL)) is None


@pytest.mark.parametrize(
    ("field", "value", "told", "hopeless"),
    [
        ("refuses", "the prompt is empty", "rejects a request of one token: the prompt is empty", True),
        ("broken", "CUDA error", "failed a request of one token: CUDA error", False),
    ],
)
@staged
async def test_why_a_canary_failed_is_said(
    stage: Stage, field: str, value: str, told: str, hopeless: bool
) -> None:
    """One that refuses would refuse everything: no use in starting it again."""
    worker = await start(stage, health=QUICK, prepare=lambda engine: setattr(engine, field, value))
    await until(lambda: worker.ended is not None, 20.0)
    assert worker.ended is not None
    assert told in worker.ended
    assert worker.actor.unrecoverable == hopeless
    assert await stage.records() == []


@pytest.mark.parametrize("size", ["block_size", "total_blocks", "max_running"])
@staged
async def test_an_engine_that_reports_no_size_is_never_registered(stage: Stage, size: str) -> None:
    """Routers would not read its event, and the fleet would seem ready."""

    class Sizeless(ControlledSim):
        """Does not know a size of its own."""

        async def start(self) -> EngineInfo:
            """See `Engine.start`."""
            sizes: dict[str, Any] = {size: 0}
            return (await super().start())._replace(**sizes)

    worker = await start(stage, make=Sizeless, health=QUICK)
    await until(lambda: worker.ended is not None, 20.0)
    assert worker.ended is not None
    assert f"the engine reports {size}=0" in worker.ended
    assert worker.actor.unrecoverable
    assert await stage.records() == []


class Pooling(ControlledSim):
    """An embedding model's engine."""

    capabilities = frozenset({"embed", "clear_kv"})

    async def start(self) -> EngineInfo:
        """See `Engine.start`."""
        self.embedded: list[EmbedRequest] = []
        return (await super().start())._replace(tasks=("score",))

    async def embed(self, request: EmbedRequest) -> tuple[bytes, ...]:
        """See `Engine.embed`."""
        self.embedded.append(request)
        return (b"\0\0\0\0",)


@staged
async def test_a_pooling_model_is_asked_for_a_vector(stage: Stage) -> None:
    """It can not generate."""
    worker = await ready(stage, make=Pooling, health=QUICK)
    assert isinstance(worker.engine, Pooling)
    assert worker.engine.asked == []
    assert [one.task for one in worker.engine.embedded] == ["score"]


class Drawing(ControlledSim):
    """The engine of a model that generates images only."""

    capabilities = frozenset({"image_generation"})

    async def start(self) -> EngineInfo:
        """See `Engine.start`."""
        self.drawn: list[ImageRequest] = []
        return (await super().start())._replace(image_generation=SUPPORT)

    async def generate_images(self, request: ImageRequest, emit: EmitFile) -> None:
        """See `Engine.generate_images`."""
        self.drawn.append(request)


@staged
async def test_a_model_of_images_is_asked_for_the_smallest(stage: Stage) -> None:
    """In one step: it can not generate text."""
    worker = await ready(stage, make=Drawing, health=QUICK)
    assert isinstance(worker.engine, Drawing)
    assert worker.engine.asked == []
    side = SUPPORT.side_min
    assert [(one.width, one.height, one.steps) for one in worker.engine.drawn] == [(side, side, 1)]


@pytest.mark.parametrize("role", ["prefill", "decode"])
@staged
async def test_a_role_is_warmed_up_through_its_leg(stage: Stage, role: Any) -> None:
    """What it pinned is released; nothing is cached when it joins."""
    worker = await ready(stage, health=QUICK, profile=WorkerProfile(role=role))
    assert [one.leg for one in worker.engine.asked] == ["", role]
    assert worker.engine.released == ([worker.engine.asked[1].request] if role == "prefill" else [])
    assert events_of(await stage.records(), BlocksStored) == []
    assert events_of(await stage.records(), WorkerJoined)[0].role == role


class NoLegs(ControlledSim):
    """Its legs do not work."""

    def submit(self, request: Any, emit: Any, transfer: Any = None) -> None:
        """See `Engine.submit`."""
        if request.leg:
            asyncio.get_running_loop().call_soon(emit, Step((), "error", detail="no link"))
        else:
            super().submit(request, emit, transfer)


class NoHandoff(ControlledSim):
    """It has no legs."""

    capabilities = SimEngine.capabilities


@pytest.mark.parametrize("make", [NoLegs, NoHandoff])
@staged
async def test_a_warm_up_that_fails_stops_nobody(stage: Stage, make: type[ControlledSim]) -> None:
    """It is a warning: the first hand-off will show."""
    await ready(stage, make=make, health=QUICK, profile=WorkerProfile(role="prefill"))


class SlowToLetGo(ControlledSim):
    """Blocks of the warm-up stay pinned for a while, as vLLM's do until its next step."""

    refusals = 3

    async def clear_kv(self) -> None:
        """See `Engine.clear_kv`."""
        if self.refusals:
            self.refusals -= 1
            raise EngineError("hand-offs hold blocks")
        await super().clear_kv()


@pytest.mark.parametrize("refusals", [3, 10_000])
@staged
async def test_a_cache_that_can_not_be_cleared_yet_does_not_end_the_worker(
    stage: Stage, refusals: int
) -> None:
    """It is tried again, and given up in the end: what is cached is announced anyway."""
    worker = await start(stage, make=SlowToLetGo, health=QUICK, profile=WorkerProfile(role="prefill"))
    worker.engine.refusals = refusals  # type: ignore[attr-defined]
    await until(lambda: worker.actor.ready.is_set(), 30.0)
    assert worker.ended is None


class SplitSim(ControlledSim):
    """Serves the legs of split requests, and no whole one."""

    capabilities = ControlledSim.capabilities | {"split_only"}


@pytest.mark.parametrize("role", ["prefill", "decode"])
@staged
async def test_an_engine_that_serves_legs_only_is_asked_for_its_own(stage: Stage, role: Role) -> None:
    """When it starts and while it is idle; nobody reads the answer, as the missing edge shows. Its role stays."""
    worker = await ready(stage, make=SplitSim, health=QUICK, profile=WorkerProfile(role=role))
    await asyncio.sleep(65.0)
    assert len(worker.engine.asked) > 5
    assert {(one.leg, one.edge) for one in worker.engine.asked} == {(role, "")}
    assert worker.ended is None
    refused = await worker.told("role", role="both")
    assert (refused.status, f"to {role} only" in refused.detail) == (409, True)
