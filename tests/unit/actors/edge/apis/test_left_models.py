"""Cards that earlier runs left: they hide no model that is served, and the edge is as healthy as without them."""

import asyncio
from collections.abc import Iterator

import msgspec
import pytest

from headwater.actors.edge.catalog import RETRY_S
from headwater.actors.runtime.tables import CardTable
from headwater.schemas.names import pool_name
from tests.support.worlds.edge import EdgeWorld

NAME = "n"


@pytest.fixture(params=["before", "after"])
def edge(request: pytest.FixtureRequest) -> Iterator[EdgeWorld]:
    """An edge whose model was served in blocks of other sizes before; it learns of those before the present one, or after it."""
    with EdgeWorld() as world:
        left = pool_name(NAME, 8)
        if request.param == "before":
            world.runner.run(leave(world, left))
        world.serve(NAME)
        world.runner.run(leave(world, left))
        world.runner.run(leave(world, pool_name(NAME, 64)))
        yield world


async def leave(world: EdgeWorld, pool: str) -> None:
    """A card of the same name that is still there without any worker."""
    cards = CardTable(world.world.cards)
    present = await cards.get_model(pool_name("m", 16))
    assert present is not None
    block_size = int(pool.rpartition("-b")[2])
    await cards.put_model(msgspec.structs.replace(present, name=NAME, pool=pool, block_size=block_size))
    async with asyncio.timeout(20):
        while pool not in [card.pool for card in world.models.cards()]:
            await world.clock.advance(RETRY_S)


def test_a_name_is_that_of_the_pool_with_workers(edge: EdgeWorld) -> None:
    """Whichever card came first."""
    answer = edge.ask("/v1/completions", {"model": NAME, "prompt": "hello", "max_tokens": 4})
    assert answer.status == 200, answer.body
    assert edge.queries
    shown = edge.ask(f"/v1/models/{NAME}", b"", method="GET")
    assert shown.document["limits"]["block_tokens"] == 16
    listed = edge.ask("/v1/models", b"", method="GET").document["data"]
    assert sorted(one["id"] for one in listed) == ["m", NAME]


def test_workers_are_counted_by_name_over_all_pools(edge: EdgeWorld) -> None:
    """What is left adds none, and takes none away."""
    healthy, document = edge.app.health()
    assert healthy
    assert document["workers"] == {"m": 1, NAME: 1}
