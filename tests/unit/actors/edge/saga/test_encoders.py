"""Which images go to encode workers, and what becomes of those that none encodes."""

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from headwater.actors.edge.saga.http_call import NO_HINTS
from headwater.actors.edge.saga.placement import Dispatcher, EncodeLeg, Encoders
from headwater.actors.runtime.ports import BusError
from headwater.router.encode_leg import ANY_AHEAD, NOT_APART, WAIT_S_MAX, WAIT_S_MIN
from headwater.schemas.encode_requests import Declined, Encoded, EncodeReply, EncodeRequest
from headwater.schemas.inference import Refused
from headwater.schemas.media import ImageEmbedding, LocalPlace, Offer, PromptMedia
from headwater.schemas.routing import (
    NO_CONSTRAINTS,
    NO_PREFERENCES,
    Candidate,
    Constraints,
    Decision,
    EncodeEstimate,
    RouteQuery,
    RouteRefused,
    Weights,
)
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


def decision(chosen: Candidate, estimate: EncodeEstimate | None = None) -> Decision:
    """The choice of a worker."""
    made = Decision(
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
    return msgspec.structs.replace(made, encoding=estimate)


class Fleet:
    """A router that names `routes` in turn, and encode workers that reply `replies` in turn."""

    edge = "edge-0"
    encode_legs = "estimate"

    def __init__(
        self,
        routes: Sequence[Candidate | None],
        replies: Sequence[EncodeReply | BusError],
        *,
        encodes: bool = True,
        estimate: EncodeEstimate | None = None,
    ) -> None:
        self.estimate = estimate
        self.clock = SkippingClock()
        self.ports = SimpleNamespace(clock=self.clock)
        self.closed = False
        self.waits: list[float] = []
        self.spawned: list[asyncio.Task[None]] = []
        self.late_s = 0.0
        self.routes = list(routes)
        self.replies = list(replies)
        self.encodes = encodes
        self.asked: list[tuple[str, Constraints, int, bytes]] = []
        self.sent: list[tuple[str, int, EncodeRequest]] = []

    def embedding_format(self, pool: str, worker: str, kinds: set[str]) -> str:
        """As `WorkerRegistry` does."""
        return "sim" if self.encodes and (pool, worker) == ("pool", "worker-0") else ""

    def waiting(self) -> "contextlib.AbstractContextManager[None]":
        """As `WorkerRegistry` does."""
        return contextlib.nullcontext()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """As `WorkerRegistry` does."""
        self.spawned.append(asyncio.ensure_future(work))

    async def query(self, query: RouteQuery) -> Decision | RouteRefused:
        """The router."""
        assert (query.reader, query.flow.waits) == ("worker-0", False)
        self.asked.append((query.request, query.constraints, query.prompt_tokens, query.hashes))
        found = self.routes.pop(0)
        return RouteRefused("none", 1.0) if found is None else decision(found, self.estimate)

    async def encode(self, worker: str, epoch: int, request: EncodeRequest, wait_s: float) -> EncodeReply:
        """As `WorkerRegistry` does."""
        self.waits.append(wait_s)
        self.clock.now_s += min(self.late_s, wait_s)
        self.sent.append((worker, epoch, request))
        reply = self.replies.pop(0)
        if isinstance(reply, BusError):
            raise reply
        return reply

    async def run(
        self, media: Sequence[PromptMedia], server: Candidate
    ) -> tuple[list[bool], list[tuple[Any, ...]]]:
        """Which images have an embedding afterwards, and (outcome, worker) of each that was considered."""
        workers: Any = self
        encoders = Encoders(RoutedDispatcher(workers, "pool", NO_HINTS), BLOCK)
        leg = EncodeLeg("r", 0, "r-0-1", decision(server))
        found, events = await encoders.encode(leg, media, WANTED)
        assert [msgspec.structs.replace(item, embedding=None) for item in found] == list(media)
        return [item.embedding == EMBEDDING for item in found], [(one.outcome, one.worker) for one in events]


class RoutedDispatcher(Dispatcher):
    """Its routers are the workers' double."""

    async def query(self, query: RouteQuery) -> Decision | RouteRefused:
        """See `Dispatcher.query`."""
        return await cast("Fleet", self.workers).query(query)


SERVER = candidate("worker-0")
WANTED = Constraints(
    needs=("images",), tolerates=("gpu",), media_processor="digest", tier="gold", lora_name="adapter"
)
"""Those of a request with images: encode workers must tolerate and process the same, and nothing else."""


async def test_always_apart_whatever_the_estimate_says() -> None:
    """An image that is encoded ten times faster by the serving worker; and however much is ahead of it."""
    slow = EncodeEstimate("worker-0", 0.0, 100.0, 1.0, 1.0, 10.0)
    for always, outcome in ((False, ("local", "encode-0")), (True, ("computed", "encode-0"))):
        fleet = Fleet([candidate("encode-0")], [Encoded(EMBEDDING, False)], estimate=slow)
        fleet.encode_legs = "always" if always else "estimate"
        assert await fleet.run([image("a", 0)], SERVER) == ([always], [outcome])
    [(_, _, request)] = fleet.sent
    assert request.ahead_max == ANY_AHEAD
    assert fleet.waits == [WAIT_S_MAX]


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
    assert constraints == Constraints(
        needs=("encode",), pairs_with="sim", tolerates=("gpu",), media_processor="digest"
    )
    assert (tokens, len(hashes)) == (48, 3 * 8)


async def test_nothing_is_asked_for_a_worker_that_takes_no_embeddings() -> None:
    """Nor where no image is to be encoded apart."""
    fleet = Fleet([], [], encodes=False)
    assert await fleet.run([image("a", 0)], SERVER) == ([False], [])
    fleet = Fleet([], [])
    fleet.encode_legs = "never"
    assert await fleet.run([image("a", 0)], SERVER) == ([False], [])


async def test_videos_and_audio_go_to_workers_that_encode_such() -> None:
    """Next to an image, which any encode worker takes."""
    media = [
        image("a", 8),
        PromptMedia("video", "v" * 32, 60, 40, (8, 28, 28, 3)),
        PromptMedia("audio", "c" * 32, 110, 25, (16_000,)),
    ]
    names = [f"encode-{number}" for number in range(3)]
    fleet = Fleet([candidate(name) for name in names], [Encoded(EMBEDDING, False)] * 3)
    assert await fleet.run(media, SERVER) == ([True] * 3, [("computed", name) for name in names])
    assert [constraints.needs for _, constraints, _, _ in fleet.asked] == [
        ("encode",),
        ("encode", "videos"),
        ("encode", "audio"),
    ]


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


SLOW_WAY = EncodeEstimate("worker-0", 0.0, 20.0, 0.5, 30.0, 20.0)
"""Reading the embedding takes longer than encoding the image where the request is served."""

FAST_WAY = EncodeEstimate("worker-0", 10.0, 20.0, 0.5, 2.0, 40.0)


async def test_an_image_stays_where_the_estimate_says_it_is_encoded_sooner() -> None:
    """The encode worker, which the router counts it for, is sent word that it does not encode it. Nothing waits for that."""
    fleet = Fleet([candidate("encode-0")], [Declined(0)], estimate=SLOW_WAY)
    assert await fleet.run([image("a", 0)], SERVER) == ([False], [("local", "encode-0")])
    await asyncio.gather(*fleet.spawned)
    assert [request.ahead_max for _, _, request in fleet.sent] == [NOT_APART]
    apart = Fleet([candidate("encode-0")], [Encoded(EMBEDDING, False)], estimate=FAST_WAY)
    assert await apart.run([image("a", 0)], SERVER) == ([True], [("computed", "encode-0")])
    assert [request.ahead_max for _, _, request in apart.sent] == [(40 + 4 - 2 - 20) * 2]


async def test_a_silent_encode_worker_costs_no_more_than_a_multiple_of_its_estimate() -> None:
    """Over all tries: one that is stopped does not answer the second time either, and another one has no time left."""
    fleet = Fleet(
        [candidate("encode-0"), candidate("encode-1")],
        [BusError("it did not answer"), BusError("nor did this")],
        estimate=FAST_WAY,
    )
    fleet.late_s = 60.0
    assert await fleet.run([image("a", 0)], SERVER) == ([False], [("failed", "encode-0")])
    assert fleet.waits == [WAIT_S_MIN]
    quick = Fleet(
        [candidate("encode-0"), candidate("encode-1")],
        [BusError("it is gone"), Encoded(EMBEDDING, False)],
        estimate=FAST_WAY,
    )
    quick.late_s = 0.25
    assert await quick.run([image("a", 0)], SERVER) == ([True], [("computed", "encode-1")])
    assert quick.waits == [WAIT_S_MIN, WAIT_S_MIN - 0.25]
