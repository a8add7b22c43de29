"""A message for one worker after the other, until one answers it."""

import asyncio
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from headwater.actors.edge.saga.http_call import RoutingHints
from headwater.actors.edge.saga.placement import TRIES_MAX, Addressed, Dispatcher, MessagePlacement
from headwater.actors.edge.saga.types import MOVE_S_MAX, PLACE_S_MAX
from headwater.actors.http.errors import ApiError
from headwater.schemas.inference import Refused
from headwater.schemas.routing import NO_CONSTRAINTS, Decision, RouteQuery, RouteRefused
from tests.unit.router.test_load import decision


class Routed:
    """In the place of the registry and of the record: a router that names these incarnations of a worker, one after the other."""

    def __init__(self, *epochs: int) -> None:
        self.ports = SimpleNamespace(clock=SimpleNamespace(monotonic_s=lambda: 0.0))
        self.closed = False
        self.sent: list[int] = []
        self._epochs = list(epochs)

    async def query(self, query: object) -> Decision:
        """The next one."""
        return replace(decision("r"), epoch=self._epochs.pop(0))

    async def send(self, to: Decision, attempt: str) -> Any:
        """Its worker dies with the message."""
        self.sent.append(to.epoch)
        return Refused("it died", True, fatal=True)


class RoutedDispatcher(Dispatcher):
    """Its routers are the workers' double."""

    async def query(self, query: RouteQuery) -> Decision | RouteRefused:
        """See `Dispatcher.query`."""
        return await cast("Routed", self.workers).query(query)


def place(routed: Routed, message: Addressed, unreachable: Callable[[], Iterable[str]] = tuple) -> Any:
    """The answer to a message."""
    dispatcher = RoutedDispatcher(cast("Any", routed), "pool", RoutingHints())
    return asyncio.run(MessagePlacement(dispatcher, message, unreachable).deliver(routed.send))


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


class Timed(Routed):
    """A router that names no second worker until `back_s`. The first worker answers after `computes_s`, with `first`."""

    def __init__(self, first: Refused, *, computes_s: float, back_s: float = 0.0) -> None:
        super().__init__(1, 2)
        self.now_s = 0.0
        self.ports = SimpleNamespace(clock=self)
        self.excluded: list[tuple[str, ...]] = []
        self._first = first
        self._computes_s = computes_s
        self._back_s = back_s

    def monotonic_s(self) -> float:
        """Seconds that have passed."""
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        """They pass at once."""
        self.now_s += seconds

    async def query(self, query: Any) -> Any:
        """The next one, unless there is none now."""
        self.excluded.append(query.constraints.exclude)
        if self.sent and self.now_s < self._back_s:
            return RouteRefused("no worker", 1.0)
        return await super().query(query)

    async def send(self, to: Decision, attempt: str) -> Any:
        """Only the second worker answers."""
        self.sent.append(to.epoch)
        if to.epoch == 2:
            return "answer"
        self.now_s += self._computes_s
        return self._first


def test_what_a_worker_computed_before_it_refused_is_no_part_of_the_search() -> None:
    """However long that took, another one is searched for."""
    timed = Timed(Refused("too few vectors", True), computes_s=3 * PLACE_S_MAX, back_s=3 * PLACE_S_MAX + 5.0)
    assert place(timed, Addressed("r", 0, 10, NO_CONSTRAINTS)) == "answer"


def test_the_search_after_a_death_lasts_until_the_only_worker_is_there_again() -> None:
    """As one that moves an answer; a refusal gives it no such time."""
    for died, back_s in ((True, MOVE_S_MAX - 5.0), (False, PLACE_S_MAX + 5.0)):
        timed = Timed(Refused("it died", True, fatal=died), computes_s=0.0, back_s=back_s)
        if died:
            assert place(timed, Addressed("r", 0, 10, NO_CONSTRAINTS)) == "answer"
        else:
            with pytest.raises(ApiError, match="No worker could take the request"):
                place(timed, Addressed("r", 0, 10, NO_CONSTRAINTS))


def test_what_every_worker_would_refuse_is_sent_once() -> None:
    """The client learns the engine's reason."""
    timed = Timed(Refused("bad prompt", False), computes_s=0.0)
    with pytest.raises(ApiError, match="bad prompt"):
        place(timed, Addressed("r", 0, 10, NO_CONSTRAINTS))
    assert timed.sent == [1]


def test_a_worker_that_is_gone_is_never_asked_again() -> None:
    """One that refused is, once the router has no other."""
    for gone, again in ((True, ("w1.1",)), (False, ())):
        timed = Timed(Refused("it is shutting down", True, gone=gone), computes_s=0.0, back_s=1.0)
        assert place(timed, Addressed("r", 0, 10, NO_CONSTRAINTS)) == "answer"
        assert [timed.excluded[1], timed.excluded[2]] == [("w1.1",), again]


def test_no_query_names_what_is_unreachable_when_it_is_made() -> None:
    """Besides what failed: both as they are at that moment, each once."""
    timed = Timed(Refused("full", True), computes_s=0.0)
    unreachable = iter([("w7.1",), ("w1.1", "w8.1")])
    message = Addressed("r", 0, 10, NO_CONSTRAINTS)
    assert place(timed, message, lambda: next(unreachable)) == "answer"
    assert timed.excluded == [("w7.1",), ("w1.1", "w8.1")]
