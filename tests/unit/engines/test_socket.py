"""vLLM's event socket over real ZMQ: order, holes that are filled, holes that cannot be, repeats.

The publisher is an XPUB socket, which speaks as vLLM's PUB does and hears when the subscriber is connected.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from headwater.engines import kv_socket as kv_socket
from headwater.engines.engine import KvEvent
from headwater.engines.kv_events import KvTranslator
from headwater.engines.kv_socket import KvSocket
from headwater.schemas.events import BlocksCleared, BlocksStored, KvGap
from headwater.schemas.hashing import chain_plain, pack_hashes, sequence_hashes, unpack_tokens
from tests.support.worlds.clock import running

SIZE = 4
END = (1 << 64) - 1


def payload(number: int) -> bytes:
    """Batch `number`: one block, a prompt of its own."""
    event = {
        "type": "BlockStored",
        "block_hashes": [number],
        "parent_block_hash": None,
        "token_ids": [number] * SIZE,
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    return msgspec.msgpack.encode([0.0, [event], 0])


def ours(*numbers: int) -> list[KvEvent]:
    """What these batches are in our words."""
    names = [chain_plain([number] * SIZE, SIZE, 0)[0] for number in numbers]
    return [BlocksStored(0, name.to_bytes(8, "little")) for name in names]


class Publisher:
    """As vLLM's: numbered batches on one socket, the last `kept` of them again on request on another."""

    def __init__(self, folder: Path, *, kept: int = 100, topic_in_replay: bool = True) -> None:
        self.context = zmq.asyncio.Context()
        self.endpoint, self.replay_endpoint = (f"ipc://{folder}/{name}" for name in ("events", "replay"))
        self.kept = kept
        self.topic_in_replay = topic_in_replay
        self.answers = True
        self.batches: list[tuple[int, bytes]] = []
        self.asked: list[int] = []
        self.events = self.context.socket(zmq.XPUB)
        self.events.bind(self.endpoint)
        self.replay = self.context.socket(zmq.ROUTER)
        self.replay.bind(self.replay_endpoint)

    async def publish(self, *numbers: int, lost: bool = False) -> None:
        """Send batches; a lost one is kept for replay only."""
        for number in numbers:
            self.batches = [*self.batches, (number, payload(number))][-self.kept :]
            if not lost:
                await self.send(number, payload(number))

    async def send(self, number: int, data: bytes) -> None:
        """Send these bytes as batch `number`."""
        await self.events.send_multipart([b"", number.to_bytes(8, "big"), data])

    async def serve_replay(self) -> None:
        """Answer questions for ever."""
        while True:
            client, _, start = await self.replay.recv_multipart()
            self.asked.append(int.from_bytes(start, "big"))
            if not self.answers:
                continue
            for number, data in [*self.batches, (END, b"")]:
                if number >= self.asked[-1]:
                    topic = [b""] if self.topic_in_replay else []
                    await self.replay.send_multipart([client, b"", *topic, number.to_bytes(8, "big"), data])


@asynccontextmanager
async def connected(
    folder: Path, translator: KvTranslator | None = None, **settings: Any
) -> AsyncIterator[tuple[Publisher, AsyncIterator[list[KvEvent]], KvSocket]]:
    """A publisher, and the events that a connected socket reads from it."""
    publisher = Publisher(folder, **settings)
    translator = KvTranslator(SIZE) if translator is None else translator
    socket = KvSocket(publisher.endpoint, publisher.replay_endpoint, translator)
    try:
        async with running(publisher.serve_replay()):
            assert await publisher.events.recv() == b"\x01"
            yield publisher, socket.events(), socket
    finally:
        socket.close()
        publisher.context.destroy(linger=0)


async def take(events: AsyncIterator[list[KvEvent]]) -> list[KvEvent]:
    """The next piece, or a failure instead of a hang."""
    async with asyncio.timeout(30):
        return await anext(events)


async def test_batches_come_in_order_as_our_events(tmp_path: Path) -> None:
    """Nothing is asked for again while nothing is missing."""
    async with connected(tmp_path) as (publisher, events, _):
        await publisher.publish(0, 1, 2)
        assert [await take(events) for _ in range(3)] == [ours(0), ours(1), ours(2)]
        assert publisher.asked == []


@pytest.mark.parametrize("topic", [True, False], ids=["with topic", "older, without topic"])
async def test_a_hole_is_filled_from_the_replay(tmp_path: Path, topic: bool) -> None:
    """What was dropped on the way is asked for, once, and comes before what revealed the hole."""
    async with connected(tmp_path, topic_in_replay=topic) as (publisher, events, _):
        await publisher.publish(0)
        assert await take(events) == ours(0)
        await publisher.publish(1, 2, lost=True)
        await publisher.publish(3, 4)
        assert await take(events) == ours(1, 2, 3)
        assert await take(events) == ours(4)
        assert publisher.asked == [1]


async def test_what_was_sent_before_the_subscription_took_effect_needs_no_later_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only batches so far are looked for in the replay; once one has arrived by the subscription, nothing is."""
    monkeypatch.setattr(kv_socket, "JOIN_CHECK_S", 0.05)
    async with connected(tmp_path) as (publisher, events, _):
        await publisher.publish(0, 1, lost=True)
        assert await take(events) == ours(0, 1)
        await publisher.publish(2)
        assert await take(events) == ours(2)
        asked = len(publisher.asked)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await anext(events)
        assert len(publisher.asked) == asked


async def test_a_reader_that_comes_late_gets_everything_from_the_start(tmp_path: Path) -> None:
    """Batches that vLLM sent before anybody was connected are a hole like any other."""
    async with connected(tmp_path) as (publisher, events, _):
        await publisher.publish(0, 1, 2, lost=True)
        await publisher.publish(3)
        assert await take(events) == ours(0, 1, 2, 3)
        assert publisher.asked == [0]


async def test_a_hole_that_is_too_old_is_a_gap(tmp_path: Path) -> None:
    """What the publisher does not have any more is told as lost, and what was held is not trusted."""
    translator = KvTranslator(SIZE)
    async with connected(tmp_path, translator, kept=2) as (publisher, events, _):
        await publisher.publish(0)
        assert await take(events) == ours(0)
        await publisher.publish(1, 2, 3, lost=True)
        await publisher.publish(4)
        assert await take(events) == [KvGap(3), BlocksCleared(), *ours(4)]
        assert len(translator) == 1, "only what came after the gap is known"
        await publisher.publish(5)
        assert await take(events) == ours(5)


async def test_a_hole_that_is_only_partly_there_is_a_gap_for_the_rest(tmp_path: Path) -> None:
    """The replay ends too early: what is still missing is told, and nothing twice."""
    async with connected(tmp_path) as (publisher, events, _):
        await publisher.publish(0, 1, lost=True)
        await publisher.send(3, payload(3))
        gap, clear, *rest = await take(events)
        assert isinstance(gap, KvGap)
        assert gap.missing >= 1
        assert [clear, *rest] == [BlocksCleared(), *ours(3)]
        await publisher.publish(4)
        assert await take(events) == ours(4)


async def test_an_unanswered_question_is_a_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay socket that is silent delays the events by its time-out, not for ever."""
    monkeypatch.setattr(kv_socket, "REPLAY_TIMEOUT_MS", 50)
    async with connected(tmp_path) as (publisher, events, _):
        publisher.answers = False
        await publisher.publish(0, 1, lost=True)
        await publisher.publish(2)
        assert await take(events) == [KvGap(2), BlocksCleared(), *ours(2)]
        publisher.answers = True
        await publisher.publish(3)
        assert await take(events) == ours(3)


async def test_repeated_batches_are_skipped(tmp_path: Path) -> None:
    """A batch that was replayed may still come by the socket: it counts once."""
    async with connected(tmp_path) as (publisher, events, socket):
        await publisher.publish(0, 1, 0, 1, 1)
        await publisher.publish(2)
        assert [await take(events) for _ in range(3)] == [ours(0), ours(1), ours(2)]
        assert await socket.accept(1, payload(1)) == []
        assert publisher.asked == []


@pytest.mark.parametrize(
    "data",
    [
        b"garbage",
        msgspec.msgpack.encode([0.0, [{"type": "BlockStored", "block_size": SIZE}]]),
        msgspec.msgpack.encode([0.0, [["BlockRemoved", None, "GPU"]]]),
        msgspec.msgpack.encode([0.0, [["BlockStored", [1], None, [-1] * SIZE, SIZE]]]),
        msgspec.msgpack.encode([0.0, [["BlockStored", [1], None, [2**40] * SIZE, SIZE]]]),
    ],
    ids=["no msgpack", "no hashes", "null hashes", "negative token", "token too large"],
)
async def test_an_unreadable_batch_is_a_gap_and_not_the_end(tmp_path: Path, data: bytes) -> None:
    """Something was announced that we do not know: cold until announced anew, and reading goes on."""
    async with connected(tmp_path) as (publisher, events, _):
        await publisher.send(0, data)
        await publisher.publish(1)
        assert await take(events) == [KvGap(1), BlocksCleared()]
        assert await take(events) == ours(1)


def test_the_publisher_here_names_blocks_as_an_edge_does() -> None:
    """What the tests above compare with is what an edge would compute."""
    tokens = unpack_tokens(bytes([7, 0, 0, 0]) * SIZE)
    [event] = ours(7)
    assert isinstance(event, BlocksStored)
    assert event.hashes == pack_hashes(sequence_hashes(tokens, SIZE))


async def test_a_clear_that_was_asked_for_is_told_without_a_batch(tmp_path: Path) -> None:
    """An engine that sleeps sends none; what was on its way is old, what comes behind its own word is new."""
    async with connected(tmp_path) as (publisher, events, socket):
        await publisher.publish(0)
        assert await take(events) == ours(0)
        socket.expect_clear()
        socket.confirm_clear()
        assert await take(events) == [BlocksCleared()]
        await publisher.publish(1)
        clear = msgspec.msgpack.encode([0.0, [{"type": "AllBlocksCleared"}], 0])
        await publisher.send(2, clear)
        await publisher.publish(3)
        assert await take(events) == ours(3)


async def test_a_dump_makes_an_untold_clear_needless(tmp_path: Path) -> None:
    """It is in there already."""
    async with connected(tmp_path) as (publisher, events, socket):
        socket.expect_clear()
        socket.confirm_clear()
        socket.discard_pending()
        clear = msgspec.msgpack.encode([0.0, [{"type": "AllBlocksCleared"}], 0])
        await publisher.send(0, clear)
        await publisher.publish(1)
        assert await take(events) == ours(1)
