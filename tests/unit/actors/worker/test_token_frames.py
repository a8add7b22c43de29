"""Token frames: one message per edge and step, and what an edge that missed some is told."""

import msgspec
import pytest

from headwater.actors.edge.prompt.prepare import PROMPT_LOGPROBS_MAX
from headwater.actors.runtime.ports import BusClosed, BusError, MemoryBus, Message
from headwater.actors.worker import token_frames
from headwater.actors.worker.token_frames import FrameSender
from headwater.engines.engine import Step
from headwater.schemas.inference import FrameEntry, GenerateRequest, Sampling, TokenFrame, TokenLogprob
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


PAYLOAD_MAX = 1024 * 1024
"""What a NATS server accepts by default."""


class BoundedBus(MemoryBus):
    """A bus with a server's bound on messages."""

    async def publish(self, subject: str, data: bytes) -> None:
        """See `Bus.publish`."""
        if len(data) > PAYLOAD_MAX:
            raise BusError("maximum payload exceeded")
        await super().publish(subject, data)


def scored(tokens: int, alternatives: int) -> tuple[TokenLogprob, ...]:
    """The longest log probabilities of so many tokens."""
    top = tuple((2**31 + number, -1.23456789) for number in range(alternatives))
    return (TokenLogprob(-0.123456789, top),) * tokens


@pytest.mark.parametrize("alternatives", [0, 1, 20])
async def test_long_prompts_scored_in_one_step_are_sent_in_parts(alternatives: int) -> None:
    """Each is as long as the edge accepts: together they are longer than a message may be."""
    edges = Edges()
    edges.bus = BoundedBus()
    await edges.listen()
    names = "abcdef"
    one = sender(edges.bus, *(request(name, number) for number, name in enumerate(names)))
    scores = scored(PROMPT_LOGPROBS_MAX // (alternatives + 1), alternatives)
    async with running(one.run()):
        for number, name in enumerate(names):
            one.send_step(name, Step((number,), logprobs=scored(1, 20), prompt_logprobs=(None, *scores[1:])))
        await one.flush()
        await settle()
    frames = edges.frames["e1"]
    assert [entry.handle for frame in frames for entry in frame.entries] == list(range(6))
    assert [len(entry.prompt_logprobs) for frame in frames for entry in frame.entries] == [len(scores)] * 6
    assert 2 <= len(frames) <= 6
    await edges.leave()


@pytest.mark.parametrize("prompt", [0, 20_000])
def test_an_edge_catches_up_in_messages_of_a_bounded_size(prompt: int) -> None:
    """A long answer with log probabilities takes several queries; only the last one tells its end."""
    one = sender(MemoryBus(), request("a", 7))
    tokens, logprobs = tuple(range(5_000)), scored(5_000, 20)
    one.send_step("a", Step(tokens, "length", 16, logprobs, prompt_logprobs=scored(prompt, 0)))
    received: list[int] = []
    sizes = []
    while True:
        reply = one.status("a", len(received))
        entry = reply.entry
        assert entry is not None
        assert len(msgspec.msgpack.encode(reply)) < PAYLOAD_MAX
        assert len(entry.prompt_logprobs) == (0 if received else prompt)
        assert len(entry.logprobs) == len(entry.tokens) > 0
        assert len(entry.prompt_logprobs) + 21 * len(entry.logprobs) <= token_frames.LOGPROBS_MAX
        received += entry.tokens
        sizes.append(len(entry.tokens))
        if entry.finish:
            break
    assert received == list(tokens)
    assert 4 <= len(sizes) <= 5
    # Without log probabilities one message has everything.
    other = sender(MemoryBus(), request("b", 8))
    other.send_step("b", Step(tokens, "length"))
    assert other.status("b", 0).entry == FrameEntry(8, 0, tokens, "length")


def test_a_token_that_is_too_long_alone_is_sent_all_the_same() -> None:
    """Otherwise its edge would ask without end."""
    one = sender(MemoryBus(), request("a", 7))
    one.send_step("a", Step((1, 2), "stop", logprobs=scored(2, token_frames.LOGPROBS_MAX)))
    first = one.status("a", 0).entry
    assert first is not None
    assert (first.tokens, first.finish) == ((1,), "")
    second = one.status("a", 1).entry
    assert second is not None
    assert (second.tokens, second.finish) == ((2,), "stop")


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
