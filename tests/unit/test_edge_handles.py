"""Frames find a request by a number: one that an earlier life of the edge gave must never find another request."""

from collections.abc import Coroutine
from typing import Any, cast

import msgspec

from headwater.actors.bus_port import Message
from headwater.actors.edge.fleet import Fleet
from headwater.actors.edge.saga import Saga
from headwater.schemas.inference import FrameEntry, TokenFrame
from tests.unit.clock import ManualClock
from tests.unit.edge_world import memory_world


class Listener:
    """Stands where a request stands; notes what it is given."""

    def __init__(self) -> None:
        self.got: list[FrameEntry] = []

    def on_entry(self, entry: FrameEntry, _: float) -> None:
        """See `Saga.on_entry`."""
        self.got.append(entry)


def life(epoch: int) -> tuple[Fleet, Listener, int]:
    """A life of edge e1 with one request, and the number under which frames find it."""

    def spawn(work: Coroutine[Any, Any, None], _: str) -> None:
        work.close()

    fleet = Fleet(memory_world(ManualClock()), "e1", spawn)
    fleet.begin(epoch)
    listener = Listener()
    return fleet, listener, fleet.adopt(cast(Saga, listener))


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
