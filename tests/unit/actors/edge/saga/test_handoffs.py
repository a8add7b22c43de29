"""Frames find a request by a number: one that an earlier life of the edge gave must never find another request."""

import msgspec

from headwater.actors.edge.saga.workers import WorkerRegistry
from headwater.actors.runtime.ports import Message
from headwater.schemas.inference import FrameEntry, TokenFrame
from tests.support.worlds.clock import ManualClock
from tests.support.worlds.edge import NoTasks
from tests.support.worlds.memory import memory_world


class Listener:
    """Stands where a request stands; notes what it is given."""

    def __init__(self) -> None:
        self.got: list[FrameEntry] = []

    @property
    def source(self) -> tuple[str, int] | None:
        """See `FrameReceiver.source`."""
        return "w1", 1

    @property
    def holder(self) -> tuple[str, int] | None:
        """See `FrameReceiver.holder`."""
        return None

    def receive(self, entry: FrameEntry, now_s: float) -> None:
        """See `FrameReceiver.receive`."""
        del now_s
        self.got.append(entry)

    def lose_worker(self, reason: str) -> None:
        """See `FrameReceiver.lose_worker`."""

    def lose_holder(self, reason: str) -> None:
        """See `FrameReceiver.lose_holder`."""

    def check_silence(self, now_s: float) -> None:
        """See `FrameReceiver.check_silence`."""


def life(epoch: int) -> tuple[WorkerRegistry, Listener, int]:
    """A life of edge e1 with one request, and the number under which frames find it."""
    fleet = WorkerRegistry(memory_world(ManualClock()), "e1", NoTasks().spawn)
    fleet.begin(epoch)
    listener = Listener()
    return fleet, listener, fleet.adopt(listener)


def frame(handle: int) -> Message:
    """A worker's tokens for that number."""
    entry = FrameEntry(handle, 0, (1, 2, 3), "", 0, ())
    return Message("frames", msgspec.msgpack.encode(TokenFrame("w1", 1, (entry,))), "")


async def test_a_worker_still_sending_to_the_life_before_reaches_nobody() -> None:
    """The edge died and was started again; its first request does not get the tokens of another's first."""
    _, _, old = life(7)
    fleet, listener, new = life(9)
    await fleet.on_frame(frame(old))
    assert listener.got == []
    await fleet.on_frame(frame(new))
    assert len(listener.got) == 1
