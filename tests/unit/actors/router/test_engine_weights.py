"""Engine weights as an operator gives them to a router: what it answers, stores, and publishes again after a gap."""

from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from headwater.actors.worker.model_card import CardKeeper, Served
from headwater.engines.sim.engine import SimEngine
from headwater.events import writer
from headwater.events.ports import Gap
from headwater.ops.sim.fleet import FILES, MODEL, NAMESPACE, POOL, SETTINGS
from headwater.schemas import subjects
from headwater.schemas.control import EngineStatus, WeightsReply, WeightsRequest
from headwater.schemas.events import EnginesWeighted, WorkerJoined
from tests.support.worlds.virtual import Stage, events_of, staged, until
from tests.unit.actors.router.test_actor import asked


class OtherEngine(SimEngine):
    """The simulated engine under another name."""

    name = "other"


async def weigh(stage: Stage, weights: Any) -> WeightsReply:
    """An operator's command, or any bytes."""
    if "operator" not in stage.fleet.processes:
        stage.operator = stage.world("operator")[1]  # type: ignore[attr-defined]
    data = weights if isinstance(weights, bytes) else msgspec.msgpack.encode(WeightsRequest(weights, "me"))
    subject = subjects.engine_weights(NAMESPACE, POOL)
    answer = await stage.operator.bus.request(subject, data, timeout_s=20.0)  # type: ignore[attr-defined]
    return msgspec.msgpack.decode(answer, type=WeightsReply)


async def mixed(stage: Stage) -> None:
    """A worker of each engine, and a router."""
    await stage.engine("w1")
    await stage.engine("w2", OtherEngine)
    await stage.router("r1")


@staged
async def test_a_command_is_stored_folded_by_every_router_and_removed_again(stage: Stage) -> None:
    """One router answers; each of them routes by it; the log has who asked."""
    await mixed(stage)
    other = await stage.router("r2")
    shown = await weigh(stage, None)
    assert shown.reply.status == 200
    assert shown.engines == (EngineStatus("other", None, 1, 1, 0), EngineStatus("sim", None, 1, 1, 0))
    for used, unused, worker in (("other", "sim", "w2"), ("sim", "other", "w1")):
        told = await weigh(stage, {used: 1.0, unused: 0.0})
        assert told.reply.status == 200, told
        assert {one.engine: one.weight for one in told.engines} == {used: 1.0, unused: 0.0}
        await until(lambda used=used: other.state.loads.engine_weights.get(used) == 1.0)  # type: ignore[misc]
        for number in range(10):
            decision = await asked(stage, f"{used}{number}-0-1")
            assert decision.worker == worker
            assert decision.draw is not None
            assert decision.draw.used == used
    assert (await weigh(stage, {})).reply.detail == "engine weights removed"
    await until(lambda: not other.state.loads.engine_weights)
    assert (await asked(stage, "last-0-1")).draw is None
    stored = events_of(await stage.records(), EnginesWeighted)
    assert [event.weights for event in stored] == [{"other": 1, "sim": 0}, {"sim": 1, "other": 0}, {}]
    assert {event.by for event in stored} == {"me"}


@pytest.mark.parametrize(
    ("weights", "status", "detail"),
    [
        ({"vllm": 1.0}, 400, "no worker of this pool runs engine 'vllm'; its engines are: other, sim"),
        ({"sim": 0.0}, 400, "every weight is 0"),
        (b"\xc1", 400, "the command cannot be decoded"),
    ],
)
@staged
async def test_a_command_that_cannot_be_carried_out_changes_nothing(
    stage: Stage, weights: Any, status: int, detail: str
) -> None:
    """The answer names the mistake; the log has no event."""
    await mixed(stage)
    told = await weigh(stage, weights)
    assert told.reply.status == status
    assert told.reply.detail.startswith(detail)
    assert stage.routers["r1"].state.loads.engine_weights == {}
    assert events_of(await stage.records(), EnginesWeighted) == []


@staged
async def test_a_log_that_accepts_no_events(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """504 while the event may still be stored, as it is here later; 503 once no more of them can be kept, and then nothing is changed."""
    await mixed(stage)
    stage.fleet.store.unavailable += 1
    late = await weigh(stage, {"sim": 1.0, "other": 0.0})
    assert late.reply.status == 504
    assert late.reply.detail == "the log has not stored the weights within 5 s; show them again"
    monkeypatch.setattr(writer, "PENDING_EVENTS_MAX", 1)
    refused = await weigh(stage, {"sim": 0.0, "other": 1.0})
    assert refused.reply.status == 503
    assert refused.reply.detail == "the log accepts no events at present; nothing was changed"
    stage.fleet.store.unavailable -= 1
    await until(lambda: stage.routers["r1"].state.loads.engine_weights == {"sim": 1.0, "other": 0.0})
    assert len(events_of(await stage.records(), EnginesWeighted)) == 1


@staged
async def test_weights_survive_a_gap_in_the_log(stage: Stage) -> None:
    """The router that knew them publishes them again; one that starts later has them."""
    await mixed(stage)
    assert (await weigh(stage, {"sim": 1.0, "other": 0.0})).reply.status == 200
    router = stage.routers["r1"]
    follower = router._follower
    before = router.state
    # What a reader does when the log cannot deliver what follows.
    follower._restart_after(Gap(before.position, before.position, "purged"))
    assert router.state.loads.engine_weights == {}
    await until(lambda: router.state.loads.engine_weights == {"sim": 1.0, "other": 0.0})
    stored = events_of(await stage.records(), EnginesWeighted)
    assert [event.by for event in stored] == ["me", "router r1, after a gap in the log"]


@staged
async def test_a_worker_publishes_the_tokenizer_of_its_model_card(stage: Stage) -> None:
    """Its joining has the digest that edges find in the card."""
    actor = await stage.engine("w1")
    [joined] = events_of(await stage.records(), WorkerJoined)
    assert joined.tokenizer == actor.status.tokenizer
    assert len(joined.tokenizer) == 64


@staged
async def test_a_card_with_another_tokenizer_is_named_in_the_log(stage: Stage) -> None:
    """The pool has one card: a worker with other files changes how all its requests are read."""
    await stage.engine("w1")
    _, ports = stage.world("w2")
    engine = SimEngine(SETTINGS, ports.clock)
    info = await engine.start()
    with capture_logs() as logs:
        await CardKeeper(ports, Served(MODEL, FILES, aliases=("alias",)), engine, info).publish()
        assert not [one for one in logs if one["event"] == "tokenizer_differs"]
        files = FILES._replace(tokenizer=FILES.tokenizer + b" ")
        card = await CardKeeper(ports, Served(MODEL, files), engine, info).publish()
    [found] = [one for one in logs if one["event"] == "tokenizer_differs"]
    assert found["now"] == card.tokenizer != found["before"]
