"""The models an edge serves: cards in, models out, and one bad card among good ones."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from headwater.actors.edge.catalog import REMOVE_AFTER_S, RETRY_S, ModelCatalog
from headwater.actors.http.errors import ApiError
from headwater.actors.runtime.ports import Ports
from headwater.actors.runtime.tables import CardTable
from headwater.engines.model_files import ModelFiles, byte_model_files
from headwater.schemas import subjects
from headwater.schemas.tables import LoraCard
from tests.support.worlds.clock import ManualClock, running
from tests.support.worlds.edge import serve_model
from tests.support.worlds.memory import memory_world


def files(**changes: object) -> ModelFiles:
    """The simulator's model with other files."""
    return byte_model_files("m")._replace(**changes)  # type: ignore[arg-type]


@asynccontextmanager
async def following(world: Ports) -> AsyncIterator[ModelCatalog]:
    """ModelCatalog that have read the cards which are there."""
    models = ModelCatalog(world)
    async with running(models.run()) as task:
        known = asyncio.ensure_future(models.known.wait())
        await asyncio.wait({known, task}, timeout=30, return_when=asyncio.FIRST_COMPLETED)
        known.cancel()
        assert not task.done(), f"it ended: {task}"
        yield models
        assert not task.done(), f"it ended: {task}"


def names(models: ModelCatalog) -> list[str]:
    return [card.name for card in models.cards()]


async def test_a_published_model_is_served_with_its_files() -> None:
    """Tokenizer and template come from the object store; a model without template has none."""
    world = memory_world(ManualClock())
    await serve_model(world, "chat")
    await serve_model(world, "base", files(chat_template=""))
    async with following(world) as models:
        assert names(models) == ["base", "chat"]
        chat = models.get("chat")
        assert chat.template is not None
        assert models.get("base").template is None
        ids = await chat.tokenizer.encode("hi", add_special_tokens=False)
        assert chat.tokenizer.decoder().push(tuple(ids.tolist())) == "hi"
        assert models.get("base").tokenizer is chat.tokenizer, "equal files are held once"


async def test_an_unknown_model_is_a_404_that_names_the_served_ones() -> None:
    """The client sees what it could have asked for."""
    world = memory_world(ManualClock())
    await serve_model(world, "m")
    async with following(world) as models:
        with pytest.raises(ApiError, match=r"'other' is not served here\. Served: m") as caught:
            models.get("other")
        assert (caught.value.status, caught.value.param) == (404, "model")


async def test_without_models_the_edge_says_that_no_worker_joined() -> None:
    """An empty table is known as such, and not waited on for ever."""
    async with following(memory_world(ManualClock())) as models:
        assert names(models) == []
        with pytest.raises(ApiError, match="no worker has joined"):
            models.get("m")


async def test_a_card_that_is_deleted_ends_the_model(clock: ManualClock) -> None:
    """Cards are followed, not read once. Not at once: its workers may write it again."""
    world = memory_world(clock)
    pool = await serve_model(world, "m")
    async with following(world) as models:
        assert names(models) == ["m"]
        await world.cards.delete(subjects.card_key(pool))
        await clock.advance(REMOVE_AFTER_S - 0.1)
        assert models.get("m").card.pool == pool
        await clock.advance(0.2)
        assert names(models) == []
        with pytest.raises(ApiError, match="no worker has joined"):
            models.get("m")


async def test_a_card_that_is_written_again_was_never_gone(clock: ManualClock) -> None:
    """The table was lost and its workers wrote the cards again: requests find the model all the while, with what is new of it."""
    world = memory_world(clock)
    pool = await serve_model(world, "m")
    async with following(world) as models:
        for context in (4096, 8192):
            await world.cards.delete(subjects.card_key(pool))
            await clock.advance(REMOVE_AFTER_S / 2)
            assert models.get("m").card.pool == pool
            await serve_model(world, "m", context=context)
            async with asyncio.timeout(20):
                # Its template is compiled in a thread.
                while models.get("m").card.context_length != context:
                    await clock.advance(RETRY_S)
            await clock.advance(2 * REMOVE_AFTER_S)
            assert models.get("m").card.context_length == context


async def test_a_model_whose_files_were_lost_is_served_once_they_are_back(clock: ManualClock) -> None:
    """Its workers store them again; nobody restarts the edge, which serves the others meanwhile."""
    world = memory_world(clock)
    await serve_model(world, "lost", files(chat_template="{{ messages }}"))
    for name in await world.blobs.names("artifact/"):
        await world.blobs.delete(name)
    await serve_model(world, "good")
    async with following(world) as models:
        assert names(models) == ["good"]
        await serve_model(world, "lost", files(chat_template="{{ messages }}"))
        async with asyncio.timeout(20):
            while names(models) != ["good", "lost"]:
                await clock.advance(RETRY_S)


async def until_served(models: ModelCatalog, name: str, served: bool, clock: ManualClock) -> None:
    """Wait until a name is served, or is no more, asking as requests do."""
    async with asyncio.timeout(20):
        while True:
            await clock.advance(REMOVE_AFTER_S)
            with contextlib.suppress(ApiError):
                if models.get(name) and served:
                    return
            if not served and name not in [model.card.name for model in models.all()]:
                with pytest.raises(ApiError):
                    models.get(name)
                return
            await asyncio.sleep(0.001)


async def test_names_are_found_as_long_as_their_cards_are_there(clock: ManualClock) -> None:
    """A name that was asked for before is found once it is served, and not after it ended; so is an adapter's."""
    world = memory_world(clock)
    first = await serve_model(world, "first")
    cards = CardTable(world.cards)
    async with following(world) as models:
        assert models.get("first").card.pool == first
        with pytest.raises(ApiError):
            models.get("second")
        second = await serve_model(world, "second")
        await until_served(models, "second", True, clock)
        adapter = LoraCard(name="a", pool=second, source="/a", digest="d", rank=8, created_s=1)
        await cards.create_lora(adapter)
        await until_served(models, "a", True, clock)
        assert models.get("a").parent == "second"
        await cards.delete_lora(second, "a")
        await until_served(models, "a", False, clock)
        await world.cards.delete(subjects.card_key(second))
        await until_served(models, "second", False, clock)
        assert models.get("first").card.pool == first


async def test_a_name_wins_over_an_alias() -> None:
    """A model with aliases is found by each; an alias that is another model's name is that model."""
    world = memory_world(ManualClock())
    cards = CardTable(world.cards)
    for name, aliases in (("a", ("short", "b")), ("b", ())):
        card = await cards.get_model(await serve_model(world, name))
        assert card is not None
        await cards.put_model(msgspec.structs.replace(card, aliases=aliases))
    async with following(world) as models:
        assert models.get("short").card.name == "a"
        assert models.get("b").card.name == "b"


@pytest.mark.parametrize(
    "broken",
    [
        files(tokenizer=b"{}"),
        files(tokenizer=b"not JSON"),
        files(chat_template="{% if %}"),
        files(chat_template="{{ messages | no_such_filter }}"),
        files(chat_template="{% unknown_tag %}"),
    ],
    ids=["tokenizer", "tokenizer no JSON", "template syntax", "template filter", "template tag"],
)
async def test_a_model_that_cannot_be_loaded_does_not_stop_the_others(broken: ModelFiles) -> None:
    """One worker's bad file may not take the edge down for all models."""
    world = memory_world(ManualClock())
    await serve_model(world, "bad", broken)
    await serve_model(world, "good")
    async with following(world) as models:
        assert names(models) == ["good"]


async def test_a_card_that_is_none_does_not_stop_the_others() -> None:
    """Nor does a card of another release, or one whose files are gone."""
    world = memory_world(ManualClock())
    await world.cards.put("foreign", b"not JSON")
    await world.cards.put("older", b'{"name": "x"}')
    await serve_model(world, "lost", files(tokenizer=b'{"lost": 1}'))
    for name in await world.blobs.names("artifact/"):
        await world.blobs.delete(name)
    await serve_model(world, "good")
    async with following(world) as models:
        assert names(models) == ["good"]
