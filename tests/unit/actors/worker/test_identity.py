"""A pool has one model: a worker of another one that bears its name ends with an error that names both, and harms nobody."""

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from headwater.actors.runtime.tables import CardTable, LeaseTable
from headwater.actors.worker.actor import WorkerActor
from headwater.actors.worker.model_card import Served, check_block_size, own_card
from headwater.actors.worker.settings import WorkerProfile
from headwater.engines.engine import EngineInfo, EngineUnavailable
from headwater.engines.model_files import ModelFiles
from headwater.ops.sim.fleet import FILES, SETTINGS
from headwater.schemas.names import pool_name
from headwater.schemas.tables import ModelCard
from tests.support.engines.controlled import ControlledSim
from tests.support.worlds.clock import ManualClock
from tests.support.worlds.virtual import Stage, staged, until

ONE, OTHER = "1" * 64, "2" * 64
"""Identities of two models."""


class Started:
    """A worker that was started, with how it ended."""

    def __init__(self, actor: WorkerActor) -> None:
        self.actor = actor
        self.ended: str | None = None


def start(
    stage: Stage,
    name: str,
    files: ModelFiles,
    served: str = "default",
    *,
    profile: WorkerProfile | None = None,
    **info: Any,
) -> Started:
    """Start a worker whose folder is called as all others are, with `info` of what its engine reports."""

    class Reports(ControlledSim):
        """Says of itself what the test wants."""

        async def start(self) -> EngineInfo:
            """See `Engine.start`."""
            return (await super().start())._replace(**{"model": "default", **info})

    process, world = stage.world(name)
    actor = WorkerActor(
        world, name, Reports(SETTINGS, process), Served(served, files), drain_s=1.0, profile=profile
    )
    worker = Started(actor)

    async def live() -> None:
        worker.ended = await actor.run()

    process.start(live(), "actor")
    return worker


async def joined(worker: Started) -> None:
    """Wait until it has joined its pool."""
    await until(lambda: worker.actor.ready.is_set() or worker.ended is not None, 30.0)
    assert worker.ended is None


async def refused(worker: Started) -> str:
    """Why it ended, for good and without having joined."""
    await until(lambda: worker.ended is not None or worker.actor.ready.is_set(), 60.0)
    assert worker.ended, "it has joined"
    assert worker.actor.unrecoverable, "another start would end in the same way"
    return worker.ended


async def cards(stage: Stage) -> list[ModelCard]:
    """The model cards that there are."""
    found = await CardTable(stage.fleet.store.cards).models()
    return sorted(found, key=lambda card: card.pool)


async def live(stage: Stage) -> list[str]:
    """The workers that hold a lease."""
    leases = await LeaseTable(stage.fleet.store.leases).read_all()
    return [lease.name for lease in leases if lease.kind == "worker"]


@pytest.mark.parametrize("role", ["both", "prefill", "decode", "encode"])
@staged
async def test_a_model_that_only_bears_the_name_is_refused(stage: Stage, role: Any) -> None:
    """Whatever part of requests its worker would serve: the error has both identities, the pool and a worker of it."""
    first = start(stage, "w1", FILES._replace(identity=ONE))
    await joined(first)
    before = await cards(stage)
    second = start(stage, "w2", FILES._replace(identity=OTHER), profile=WorkerProfile(role=role))
    reason = await refused(second)
    for part in ("default", ONE[:12], OTHER[:12], "w1", pool_name("default", 16), "--served-model-name"):
        assert part in reason
    assert await cards(stage) == before
    assert await live(stage) == ["w1"]
    assert first.ended is None


@pytest.mark.parametrize("kind", ["dtype", "block_size"])
@staged
async def test_an_engine_whose_blocks_differ_is_refused(stage: Stage, kind: str) -> None:
    """Known only once it has started: it is the same model, with KV that no other worker of it can use."""
    values: dict[str, tuple[Any, Any]] = {"dtype": ("bfloat16", "float16"), "block_size": (16, 32)}
    named = {"dtype": "dtype float16", "block_size": "--block-size 32"}
    files = FILES._replace(identity=ONE)
    one, other = values[kind]
    await joined(start(stage, "w1", files, **{kind: one}))
    before = await cards(stage)
    reason = await refused(start(stage, "w2", files, **{kind: other}))
    for part in (str(one), str(other), pool_name("default", 16), named[kind]):
        assert part in reason
    assert await cards(stage) == before


@staged
async def test_what_is_not_known_is_not_compared(stage: Stage) -> None:
    """An engine that reports no type, and a folder that says nothing of its model, fit any."""
    await joined(start(stage, "w1", FILES._replace(identity=ONE), dtype="bfloat16"))
    await joined(start(stage, "w2", FILES._replace(identity="")))
    assert await live(stage) == ["w1", "w2"]
    [card] = await cards(stage)
    assert (card.identity, card.dtype) == (ONE, "bfloat16"), "what is known stays known"


@staged
async def test_the_same_model_may_have_another_template(stage: Stage) -> None:
    """It is changed one worker after the other."""
    files = FILES._replace(identity=ONE)
    await joined(start(stage, "w1", files))
    await joined(start(stage, "w2", files._replace(chat_template="{{ messages }}")))
    assert await live(stage) == ["w1", "w2"]
    [card] = await cards(stage)
    assert card.identity == ONE


@staged
async def test_a_model_takes_the_name_of_one_that_nobody_serves_any_more(stage: Stage) -> None:
    """Its card is what an earlier run left."""
    first = start(stage, "w1", FILES._replace(identity=ONE))
    await joined(first)
    first.actor.stop()
    await until(lambda: first.ended is not None, 30.0)
    await joined(start(stage, "w2", FILES._replace(identity=OTHER)))
    [card] = await cards(stage)
    assert card.identity == OTHER


@staged
async def test_folders_of_one_name_are_two_models_under_two_names(stage: Stage) -> None:
    """Some platforms mount every model at the same path: what clients ask for is what tells them apart."""
    await joined(start(stage, "w1", FILES._replace(identity=ONE), "acme/sim.v1"))
    await joined(start(stage, "w2", FILES._replace(identity=OTHER), "Acme-Sim-v1"))
    found = {card.name: (card.identity, card.pool) for card in await cards(stage)}
    assert found == {
        "acme/sim.v1": (ONE, pool_name("acme/sim.v1", 16)),
        "Acme-Sim-v1": (OTHER, pool_name("Acme-Sim-v1", 16)),
    }


@staged
async def test_of_two_models_that_start_at_once_one_stays(stage: Stage) -> None:
    """Neither sees the other's card or lease before it writes its own."""
    both = [
        start(stage, name, FILES._replace(identity=identity))
        for name, identity in (("w1", ONE), ("w2", OTHER))
    ]
    await until(lambda: [one.ended for one in both].count(None) < 2, 60.0)
    await asyncio.sleep(60.0)
    [left] = [one for one in both if one.ended is None]
    [card] = await cards(stage)
    assert card.identity == {"w1": ONE, "w2": OTHER}[left.actor.name]
    assert await live(stage) == [left.actor.name]
    [lost] = [one for one in both if one.ended is not None]
    assert lost.ended is not None
    assert ONE[:12] in lost.ended
    assert OTHER[:12] in lost.ended


@staged
async def test_a_lost_card_is_no_way_into_a_pool(stage: Stage) -> None:
    """The table of cards was lost while workers serve: whoever starts then waits for what they write again."""
    await joined(start(stage, "w1", FILES._replace(identity=ONE)))
    stage.fleet.store.cards.replace()
    reason = await refused(start(stage, "w2", FILES._replace(identity=OTHER)))
    assert ONE[:12] in reason
    [card] = await cards(stage)
    assert card.identity == ONE


def test_a_block_size_other_than_the_running_pools_is_refused_before_a_model_is_loaded() -> None:
    """Only of the same model, and only while somebody serves it."""
    base = own_card(
        Served("m", FILES), ControlledSim(SETTINGS, ManualClock()), EngineInfo("m", 32, 1, 1, 1), 0
    )
    cards = [base, replace(base, name="other", pool="other-b16", block_size=16)]
    live = {base.pool: "w1", "other-b16": "w2"}
    with pytest.raises(
        EngineUnavailable, match=r"--block-size 64: worker w1 of pool m-b32 .*--block-size 32, or under"
    ):
        check_block_size("m", 64, cards, live)
    check_block_size("m", 32, cards, live)
    check_block_size("m", 64, cards, {"other-b16": "w2"})
    check_block_size("third", 64, cards, live)
