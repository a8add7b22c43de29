"""What a worker writes of its model when it starts, it writes again once it is lost; and nobody else has to remove it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from structlog.testing import capture_logs

from headwater.actors.runtime.tables import CardTable, ModelCardChange
from headwater.actors.worker.model_card import CARD_TTL_S, CardKeeper, Served
from headwater.engines.sim.engine import SimEngine
from headwater.events.ports import LogUnavailable
from headwater.ops.sim.fleet import FILES, MODEL, POOL, SETTINGS
from headwater.schemas import subjects
from headwater.schemas.tables import ModelCard
from tests.support.engines.controlled import ControlledSim
from tests.support.worlds.control import ready
from tests.support.worlds.virtual import Stage, staged

KEPT_WITHIN_S = 10.0
"""After so long everything is there again."""


class Second(ControlledSim):
    """Another engine of the same pool."""

    name = "second"


async def card_of(stage: Stage) -> ModelCard | None:
    """The pool's card as the server has it."""
    return await CardTable(stage.fleet.store.cards).get_model(POOL)


async def artifacts(stage: Stage) -> dict[str, bytes | None]:
    """The files of models in the object store."""
    blobs = stage.fleet.store.blobs
    return {name: await blobs.get(name) for name in await blobs.names("artifact/")}


async def eventually(holds: Callable[[], Awaitable[object]], within_s: float = KEPT_WITHIN_S) -> None:
    """Wait until something is true of the store."""
    async with asyncio.timeout(within_s):
        while not await holds():
            await asyncio.sleep(0.1)


@asynccontextmanager
async def changes_of(stage: Stage) -> AsyncIterator[list[ModelCardChange]]:
    """What watchers of the table see of cards meanwhile."""
    seen: list[ModelCardChange] = []

    async def follow() -> None:
        async for changes in CardTable(stage.fleet.store.cards).watch():
            seen.extend(change for change in changes if isinstance(change, ModelCardChange))

    task = asyncio.create_task(follow())
    try:
        yield seen
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def lose_cards(stage: Stage) -> None:
    """The table is deleted, and made again by its keeper."""
    stage.fleet.store.cards.replace()


async def lose_blobs(stage: Stage) -> None:
    """The object store is deleted, and made again by its keeper."""
    for name in await stage.fleet.store.blobs.names(""):
        await stage.fleet.store.blobs.delete(name)


async def lose_everything(stage: Stage) -> None:
    """All that is stored but the log."""
    stage.fleet.store.leases.replace()
    await lose_cards(stage)
    await lose_blobs(stage)


@pytest.mark.parametrize("lose", [lose_cards, lose_blobs, lose_everything])
@staged
async def test_a_lost_card_and_its_files_are_written_again(
    stage: Stage, lose: Callable[[Stage], Awaitable[None]]
) -> None:
    """By a worker that serves: nobody has to restart it. As often as they are lost."""
    worker = await ready(stage)
    before, files = await card_of(stage), await artifacts(stage)
    assert before is not None
    assert subjects.artifact_name(before.tokenizer) in files
    for _ in range(2):
        await lose(stage)

        async def whole() -> bool:
            return (await card_of(stage), await artifacts(stage)) == (before, files)

        await eventually(whole)
        await asyncio.sleep(KEPT_WITHIN_S)
    assert worker.ended is None


@staged
async def test_a_card_of_two_engines_is_whole_again(stage: Stage) -> None:
    """Each has its part of it, and writes that."""
    await ready(stage)
    await ready(stage, name="w2", make=Second)
    before = await card_of(stage)
    assert before is not None
    assert {*before.engines} == {"sim", "second"}
    await lose_cards(stage)

    async def whole() -> bool:
        found = await card_of(stage)
        return found is not None and found.engines == before.engines

    await eventually(whole)


@staged
async def test_losing_the_store_while_it_does_not_answer_is_no_failure(stage: Stage) -> None:
    """The worker goes on, and writes what is missing once the store answers."""
    worker = await ready(stage)
    before, files = await card_of(stage), await artifacts(stage)
    stage.fleet.store.unavailable += 1
    await lose_everything(stage)
    await asyncio.sleep(60.0)
    stage.fleet.store.unavailable -= 1

    async def whole() -> bool:
        return (await card_of(stage), await artifacts(stage)) == (before, files)

    await eventually(whole, 2 * KEPT_WITHIN_S)
    assert worker.ended is None


@staged
async def test_a_card_lasts_as_long_as_its_workers(stage: Stage) -> None:
    """No watcher ever sees it gone, and few see it written again: not every worker does that."""
    for name in ("w1", "w2", "w3"):
        await ready(stage, name=name)
    async with changes_of(stage) as seen:
        await asyncio.sleep(1.5 * CARD_TTL_S)
    assert all(change.card is not None for change in seen)
    assert len(seen) <= 10


@pytest.mark.parametrize("end", ["stop", "kill"])
@staged
async def test_a_card_ends_after_the_last_of_its_workers(stage: Stage, end: Any) -> None:
    """However that ended: the model is then one that does not exist, and not one that is never available."""
    workers = [await ready(stage, name=name) for name in ("w1", "w2")]
    await asyncio.sleep(CARD_TTL_S / 2)
    for worker in workers:
        if end == "stop":
            worker.actor.stop()
        else:
            await stage.kill(worker.actor.name)
        await asyncio.sleep(CARD_TTL_S / 4)
        assert await card_of(stage) is not None, "a restart of all workers is not the end of a model"
    await asyncio.sleep(CARD_TTL_S)
    assert await card_of(stage) is None


@pytest.mark.parametrize("what", ["cards", "blobs"])
@staged
async def test_a_worker_that_has_loaded_waits_for_the_store(stage: Stage, what: str) -> None:
    """While leaders are elected, for as long as that takes: an engine loads for minutes, and would load again."""
    _, ports = stage.world("w2")
    store = _Electing(getattr(ports, what))
    stores: dict[str, Any] = {what: store}
    ports = ports._replace(**stores)
    engine = SimEngine(SETTINGS, ports.clock)
    info = await engine.start()
    with capture_logs() as logs:
        publishing = asyncio.create_task(CardKeeper(ports, Served(MODEL, FILES), engine, info).publish())
        await asyncio.sleep(20)
        assert not publishing.done()
        store.has_leader = True
        card = await publishing
    assert await card_of(stage) == card
    assert [one["event"] for one in logs] == ["model_card_awaited"]
    assert "temporarily unavailable" in logs[0]["reason"]


class _Electing:
    """A store whose servers elect a leader: it answers nothing yet."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.has_leader = False

    def __getattr__(self, name: str) -> Any:
        if not self.has_leader:
            raise LogUnavailable("JetStream system temporarily unavailable")
        return getattr(self._store, name)
