"""Which pool a command reads: the only one, or the one that is named, if there is one of that name."""

import pytest

from headwater.ops.config.errors import ConfigError
from headwater.ops.nats.pool_choice import choose_pool
from tests.support.worlds.clock import ManualClock
from tests.support.worlds.edge import serve_model
from tests.support.worlds.memory import memory_world


async def test_a_pool_that_is_not_there_is_named_with_those_that_are() -> None:
    """Reading the log of a mistyped name would make its stream, and find nothing wrong in it."""
    world = memory_world(ManualClock())
    with pytest.raises(ConfigError, match=r"--pool: there are 0 pools \(none\); name one"):
        await choose_pool(world, "")
    assert await choose_pool(world, "c") == "c"
    first = await serve_model(world, "first")
    assert await choose_pool(world, "") == first
    second = await serve_model(world, "second")
    assert await choose_pool(world, second) == second
    with pytest.raises(ConfigError, match=rf"--pool c: there is no such pool; there are: {first}, {second}"):
        await choose_pool(world, "c")
    with pytest.raises(ConfigError, match=rf"--pool: there are 2 pools \({first}, {second}\); name one"):
        await choose_pool(world, "")
