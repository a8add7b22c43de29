"""nats-py as its documentation shows it, as the baseline for the log's own paths."""

import asyncio
import time

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig, StreamConfig

STREAM = "RAW"
ONE, MANY = "raw.one", "raw.many"


class RawNats:
    """A separate stream with as many replicas as the log. Every method returns seconds."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def make_stream(self, replicas: int) -> None:
        """Make the stream."""
        config = StreamConfig(name=STREAM, subjects=["raw.>"], num_replicas=replicas)
        await self._client.jetstream().add_stream(config)

    async def one_by_one(self, messages: list[bytes]) -> float:
        """`js.publish` of each, waiting for each."""
        js = self._client.jetstream()
        began = time.perf_counter()
        for data in messages:
            await js.publish(ONE, data)
        return time.perf_counter() - began

    async def all_at_once(self, messages: list[bytes]) -> float:
        """`js.publish_async` of all, until the last is acknowledged."""
        js = self._client.jetstream(publish_async_max_pending=4000)
        began = time.perf_counter()
        await asyncio.gather(*[await js.publish_async(MANY, data) for data in messages])
        return time.perf_counter() - began

    async def fetched(self, count: int) -> float:
        """`fetch(500)` of a pull consumer until `count` messages were received."""
        config = ConsumerConfig(ack_policy=AckPolicy.NONE)
        subscription = await self._client.jetstream().pull_subscribe(MANY, stream=STREAM, config=config)
        began = time.perf_counter()
        got = 0
        while got < count:
            got += len(await subscription.fetch(500, timeout=5))
        seconds = time.perf_counter() - began
        await subscription.unsubscribe()
        return seconds

    async def ordered(self, count: int) -> float:
        """The ordered push consumer with a callback until `count` messages were received."""
        done = asyncio.Event()
        got = 0

        async def on_message(_: Msg) -> None:
            nonlocal got
            got += 1
            if got == count:
                done.set()

        began = time.perf_counter()
        subscription = await self._client.jetstream().subscribe(
            MANY, cb=on_message, ordered_consumer=True, pending_msgs_limit=-1, pending_bytes_limit=-1
        )
        async with asyncio.timeout(60):
            await done.wait()
        seconds = time.perf_counter() - began
        await subscription.unsubscribe()
        return seconds
