"""Which images go to encode workers, and what becomes of those that none encodes."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from headwater.actors.bus.port import BusError
from headwater.actors.edge.clients.encoders import EncodeLeg, Encoders, tokens_ahead_max
from headwater.schemas.constraints import NO_CONSTRAINTS, NO_PREFERENCES, Constraints
from headwater.schemas.events.route import Candidate, Decision, Weights
from headwater.schemas.messages.encode import Declined, Encoded, EncodeReply, EncodeRequest
from headwater.schemas.messages.inference import Refused
from headwater.schemas.messages.media import ImageEmbedding, PromptMedia
from headwater.schemas.messages.transfer import LocalPlace, Offer
from tests.support.worlds.clock import SkippingClock

BLOCK = 16
OFFER = Offer(b"l" * 16, "encode-0", 7, "float32", (40, 4), 640, 1, 0, LocalPlace("a", 0))
EMBEDDING = ImageEmbedding(OFFER, 5, b"{}")


def image(name: str, start: int, tokens: int = 40) -> PromptMedia:
    """An image of a prompt."""
    return PromptMedia("image", name * 32, start, tokens, (28, 28, 3))


def candidate(
    worker: str, cached: int = 0, requests: int = 0, queue: float = 0, prefill: float = 0
) -> Candidate:
    """A worker as the router saw it."""
    return Candidate(worker, 5, cached, 0, 0, 0, requests, 0.0)


def decision(chosen: Candidate) -> Decision:
    """The choice of a worker."""
    return Decision(
        1,
        1,
        0,
        0,
        "r",
        100,
        1,
        6,
        0,
        0,
        0,
        NO_CONSTRAINTS,
        NO_PREFERENCES,
        Weights(),
        0,
        chosen.worker,
        5,
        (chosen,),
    )


class Fleet:
    """A router that names `routes` in turn, and encode workers that reply `replies` in turn."""

    edge = "edge-0"

    def __init__(
        self,
        routes: Sequence[Candidate | None],
        replies: Sequence[EncodeReply | BusError],
        *,
        encodes: bool = True,
    ) -> None:
        self.routes = list(routes)
        self.replies = list(replies)
        self.encodes = encodes
        self.asked: list[tuple[str, Constraints, int, bytes]] = []
        self.sent: list[tuple[str, int, EncodeRequest]] = []

    def encodes_for(self, pool: str, worker: str) -> bool:
        """As `WorkerRegistry` does."""
        return self.encodes and (pool, worker) == ("pool", "worker-0")

    async def route(self, name: str, constraints: Constraints, tokens: int, hashes: bytes) -> Decision | None:
        """The router."""
        self.asked.append((name, constraints, tokens, hashes))
        found = self.routes.pop(0)
        return None if found is None else decision(found)

    async def encode(self, worker: str, epoch: int, request: EncodeRequest) -> EncodeReply:
        """As `WorkerRegistry` does."""
        self.sent.append((worker, epoch, request))
        reply = self.replies.pop(0)
        if isinstance(reply, BusError):
            raise reply
        return reply

    async def run(
        self, media: Sequence[PromptMedia], server: Candidate
    ) -> tuple[list[bool], list[tuple[Any, ...]]]:
        """Which images have an embedding afterwards, and (outcome, worker) of each that was considered."""
        made: Any = self
        encoders = Encoders(made, SkippingClock(), self.route, "pool", BLOCK)
        leg = EncodeLeg("r", 0, "r-0-1", decision(server))
        found, events = await encoders.encode(leg, media, ("gpu",))
        assert [msgspec.structs.replace(item, embedding=None) for item in found] == list(media)
        return [item.embedding == EMBEDDING for item in found], [(one.outcome, one.worker) for one in events]


SERVER = candidate("worker-0")


async def test_images_whose_kv_is_cached_are_left_out() -> None:
    """Only to the last full block: an image that reaches beyond it needs its embedding."""
    media = [image("a", 8), image("b", 60)]
    fleet = Fleet([candidate("encode-0")], [Encoded(EMBEDDING, False)])
    assert await fleet.run(media, candidate("worker-0", cached=6)) == (
        [False, True],
        [("computed", "encode-0")],
    )
    assert [request.item.id for _, _, request in fleet.sent] == [media[1].id]
    [(name, constraints, tokens, hashes)] = fleet.asked
    assert name == "r-0-1-e1-0"
    assert constraints == Constraints(needs=("encode",), tolerates=("gpu",))
    assert (tokens, len(hashes)) == (48, 3 * 8)


async def test_nothing_is_asked_for_a_worker_that_takes_no_embeddings() -> None:
    """Nor where there is no encode worker."""
    fleet = Fleet([], [], encodes=False)
    assert await fleet.run([image("a", 0)], SERVER) == ([False], [])


@pytest.mark.parametrize("failure", [Refused("busy", True), BusError("it is gone")], ids=["refused", "lost"])
async def test_another_encode_worker_is_tried_once(failure: EncodeReply | BusError) -> None:
    """Without the one that failed."""
    fleet = Fleet([candidate("encode-0"), candidate("encode-1")], [failure, Encoded(EMBEDDING, True)])
    assert await fleet.run([image("a", 0)], SERVER) == ([True], [("cached", "encode-1")])
    assert fleet.asked[1][1].exclude == ("encode-0.5",)
    again = Fleet([candidate("encode-0"), candidate("encode-1")], [failure, failure])
    assert await again.run([image("a", 0)], SERVER) == ([False], [("failed", "encode-1")])


async def test_what_every_encode_worker_would_refuse_is_not_sent_again() -> None:
    """The serving worker says what is wrong with it."""
    fleet = Fleet([candidate("encode-0")], [Refused("bad image", False)])
    assert await fleet.run([image("a", 0)], SERVER) == ([False], [("failed", "encode-0")])


async def test_without_a_worker_the_image_is_encoded_where_it_is_served() -> None:
    """No router, or all encode workers draining."""
    assert await Fleet([None], []).run([image("a", 0)], SERVER) == ([False], [("failed", "")])


async def test_an_image_that_would_wait_stays_with_the_serving_worker() -> None:
    """The encode worker knows best what is ahead of it."""
    fleet = Fleet([candidate("encode-0")], [Declined(90)])
    assert await fleet.run([image("a", 0)], SERVER) == ([False], [("local", "encode-0")])


@pytest.mark.parametrize(("requests", "ahead"), [(0, 0), (4, 40), (8, 80)])
def test_how_much_may_be_ahead_of_an_image(requests: int, ahead: int) -> None:
    """Encoding where a request is served delays each of those that run there: a quarter of its time, by default."""
    assert tokens_ahead_max(image("a", 0).tokens, decision(candidate("worker-0", requests=requests))) == ahead
