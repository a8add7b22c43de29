"""Whether the address of another worker's KV is reached: asked once for many prompts, and again after a while."""

import asyncio

from headwater.actors.worker.handoffs import BAD_S, GOOD_S, Reach
from headwater.ops.start.sockets import free_port
from tests.support.worlds.clock import ManualClock


async def test_a_place_is_tried_again_after_a_while_only() -> None:
    """A refused one after five seconds, a good one after thirty; what engines without an address hand over is not tried."""
    clock = ManualClock()
    reach = Reach(clock)
    assert await reach.refusal("w", "") == ""
    port = free_port(0)
    place = f"127.0.0.1:{port}"
    told = await reach.refusal("w", place)
    assert told.startswith(
        f"worker w hands its KV over at {place}, which this host does not reach (connection refused; it is a loopback"
    )
    accepted = 0

    async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal accepted
        accepted += 1
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(accept, "127.0.0.1", port) as server:
        assert await reach.refusal("w", place) == told
        await clock.advance(BAD_S)
        assert await reach.refusal("w", place) == ""
        assert await reach.refusal("w", place) == ""
        while not accepted:
            await asyncio.sleep(0)
        assert accepted == 1
        server.close()
    assert await reach.refusal("w", place) == ""
    await clock.advance(GOOD_S)
    assert await reach.refusal("w", place) == told
