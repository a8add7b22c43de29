"""A message for one worker after the other, until one answers it."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from headwater.actors.edge.saga.placement import TRIES_MAX, Addressed, Dispatcher, MessagePlacement
from headwater.actors.edge.saga.routing_hints import RoutingHints
from headwater.actors.http.errors import ApiError
from headwater.schemas.constraints import NO_CONSTRAINTS
from headwater.schemas.events.route import Decision
from headwater.schemas.messages.inference import Refused
from tests.unit.router.fold.test_load import decision


class Routed:
    """In the place of the registry and of the record: a router that names these incarnations of a worker, one after the other."""

    def __init__(self, *epochs: int) -> None:
        self.ports = SimpleNamespace(clock=SimpleNamespace(monotonic_s=lambda: 0.0))
        self.closed = False
        self.routing = self
        self.sent: list[int] = []
        self._epochs = list(epochs)

    async def route(self, pool: str, query: object) -> Decision:
        """The next one."""
        return replace(decision("r"), epoch=self._epochs.pop(0))

    def waited_s(self, since_s: float) -> float:
        """No time passes."""
        return since_s

    async def send(self, to: Decision, attempt: str) -> Any:
        """Its worker dies with the message."""
        self.sent.append(to.epoch)
        return Refused("it died", True, fatal=True)


def place(routed: Routed, message: Addressed) -> Any:
    """The answer to a message."""
    dispatcher = Dispatcher(cast("Any", routed), "pool", RoutingHints())
    return asyncio.run(MessagePlacement(dispatcher, message).deliver(routed.send))


def test_an_incarnation_counts_once_however_often_a_message_was_sent_to_it() -> None:
    """The router may name one again that is ending: its end is no second one."""
    routed = Routed(1, 1, 1, 2, 2, 3, 4)
    with pytest.raises(ApiError, match="3 workers failed"):
        place(routed, Addressed("r", 0, 10, NO_CONSTRAINTS))
    assert routed.sent == [1, 1, 1, 2, 2, 3]


def test_a_message_that_only_saves_time_is_tried_by_two_workers() -> None:
    """Whoever waits for it does without its answer sooner than it ends a third one."""
    routed = Routed(1, 2, 3)
    with pytest.raises(ApiError, match="it died"):
        place(routed, Addressed("r", 0, 10, NO_CONSTRAINTS, waits=False))
    assert len(routed.sent) == TRIES_MAX
