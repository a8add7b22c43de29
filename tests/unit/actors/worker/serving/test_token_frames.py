"""Token frames: one message per edge and step, and what an edge that missed some is told."""

import msgspec

from headwater.actors.bus.memory import MemoryBus
from headwater.actors.bus.port import BusClosed, Message
from headwater.actors.worker.serving import token_frames
from headwater.actors.worker.serving.token_frames import FrameSender
from headwater.engines.engine import Step
from headwater.schemas.messages.inference import (
    FrameEntry,
    GenerateRequest,
    Sampling,
    TokenFrame,
    TokenLogprob,
)
from headwater.schemas.subjects import edge_frames
from tests.support.worlds.clock import running, settle


class Edges:
    """Edges on a bus, and the frames each of them got."""

    def __init__(self) -> None:
        self.bus = MemoryBus()
        self.frames: dict[str, list[TokenFrame]] = {"e1": [], "e2": []}
        self.subscriptions: list[object] = []

    async def listen(self) -> None:
        """Subscribe."""
        for edge, got in self.frames.items():

            async def note(message: Message, got: list[TokenFrame] = got) -> None:
                got.append(msgspec.msgpack.decode(message.data, type=TokenFrame))

            self.subscriptions.append(await self.bus.subscribe(edge_frames("ns", edge), note))

    async def leave(self) -> None:
        """Unsubscribe."""
        for subscription in self.subscriptions:
            await subscription.unsubscribe()  # type: ignore[attr-defined]


def request(name: str, handle: int, edge: str = "e1") -> GenerateRequest:
    """A request of an edge."""
    return GenerateRequest(name, edge, handle, b"", Sampling(8))


def sender(bus: MemoryBus, *requests: GenerateRequest) -> FrameSender:
    """A sender of worker w1 in epoch 4, with open requests."""
    made = FrameSender(bus, "ns", "w1")
    made.epoch = 4
    for one in requests:
        made.open_stream(one)
    return made


async def test_a_step_is_one_frame_per_edge() -> None:
    """All of an edge's requests share a message; an edge gets nothing of another's."""
    edges = Edges()
    await edges.listen()
    one = sender(edges.bus, request("a", 1), request("b", 2), request("c", 3, "e2"))
    async with running(one.run()):
        sent = one.send_step("a", Step((10,), cached_tokens=16))
        sent += one.send_step("b", Step((20, 21)))
        sent += one.send_step("c", Step((30,)))
        await one.flush()
        await settle()
    assert edges.frames["e1"] == [
        TokenFrame("w1", 4, (FrameEntry(1, 0, (10,), cached_tokens=16), FrameEntry(2, 0, (20, 21))))
    ]
    assert edges.frames["e2"] == [TokenFrame("w1", 4, (FrameEntry(3, 0, (30,)),))]
    assert sent == 4
    await edges.leave()


async def test_positions_count_what_was_sent_before() -> None:
    """An edge sees from the position whether it missed or already has something."""
    edges = Edges()
    await edges.listen()
    one = sender(edges.bus, request("a", 1))
    async with running(one.run()):
        for tokens in ((5,), (6, 7), (), (8,)):
            one.send_step("a", Step(tokens))
            await settle()
        one.send_step("a", Step((9,), "stop"))
        await one.flush()
        await settle()
    entries = [entry for frame in edges.frames["e1"] for entry in frame.entries]
    assert [(entry.position, entry.tokens) for entry in entries] == [
        (0, (5,)),
        (1, (6, 7)),
        (3, ()),
        (3, (8,)),
        (4, (9,)),
    ]
    assert [entry.finish for entry in entries] == ["", "", "", "", "stop"]
    assert one.open_streams == []
    await edges.leave()


async def test_steps_of_unknown_and_ended_requests_are_dropped() -> None:
    """Nothing follows a finish, and nothing is sent for what was never opened."""
    edges = Edges()
    await edges.listen()
    one = sender(edges.bus, request("a", 1))
    async with running(one.run()):
        sent = one.send_step("a", Step((1,), "length"))
        sent += one.send_step("a", Step((2,)))
        sent += one.send_step("z", Step((3,)))
        await one.flush()
        await settle()
    assert [entry.tokens for frame in edges.frames["e1"] for entry in frame.entries] == [(1,)]
    assert sent == 1
    await edges.leave()


def test_an_edge_catches_up_from_any_point() -> None:
    """A status answer holds exactly what is missing, with its log probabilities and all."""
    one = sender(MemoryBus(), request("a", 7))
    logprobs = [TokenLogprob(-float(number), ((number, -0.5),)) for number in range(4)]
    one.send_step("a", Step((0, 1), cached_tokens=32, logprobs=tuple(logprobs[:2])))
    one.send_step("a", Step((2, 3), logprobs=tuple(logprobs[2:])))
    for received in range(5):
        reply = one.status("a", received)
        assert reply.known
        assert reply.entry == FrameEntry(
            7, received, tuple(range(received, 4)), "", 32, tuple(logprobs[received:])
        )


def test_an_ended_request_is_remembered_with_its_end() -> None:
    """An edge that missed the last frame still learns how it ended, and why."""
    one = sender(MemoryBus(), request("a", 7))
    one.send_step("a", Step((1,)))
    one.send_step("a", Step((2,), "error", detail="out of memory"))
    reply = one.status("a", 1)
    assert reply.entry == FrameEntry(7, 1, (2,), "error", detail="out of memory")
    assert one.status("a", 2).entry == FrameEntry(7, 2, (), "error", detail="out of memory")


def test_what_never_was_and_what_never_was_sent_is_unknown() -> None:
    """An edge that claims more than this worker sent speaks of another life's request."""
    one = sender(MemoryBus(), request("a", 7))
    one.send_step("a", Step((1,)))
    assert not one.status("z", 0).known
    assert not one.status("a", 2).known
    assert one.status("a", 1).known


def test_only_the_newest_ends_are_remembered() -> None:
    """The memory of ended requests is bounded, the oldest is forgotten first."""
    one = FrameSender(MemoryBus(), "ns", "w1")
    count = token_frames.ENDED_MAX + 10
    for number in range(count):
        one.open_stream(request(f"r{number}", number))
        one.send_step(f"r{number}", Step((), "stop"))
    known = [one.status(f"r{number}", 0).known for number in range(count)]
    assert known == [False] * 10 + [True] * token_frames.ENDED_MAX


class ClosedBus(MemoryBus):
    """A bus whose connection is away for a while."""

    closed = True

    async def publish(self, subject: str, data: bytes) -> None:
        """See `Bus.publish`."""
        if self.closed:
            raise BusClosed("the connection is closed")
        await super().publish(subject, data)


async def test_a_frame_that_cannot_be_sent_does_not_end_the_sender() -> None:
    """The edge asks for what it misses; later frames go out as if nothing had been."""
    edges = Edges()
    bus = edges.bus = ClosedBus()
    await edges.listen()
    one = sender(bus, request("a", 1))
    async with running(one.run()) as task:
        one.send_step("a", Step((1,)))
        await one.flush()
        bus.closed = False
        one.send_step("a", Step((2,)))
        await one.flush()
        await settle()
        assert not task.done()
    assert [frame.entries[0].position for frame in edges.frames["e1"]] == [1]
    assert one.status("a", 0).entry == FrameEntry(1, 0, (1, 2))
    await edges.leave()
