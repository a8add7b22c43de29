"""Images of a request, sent to encode workers before the request is dispatched.

The encode leg can only save time: where no encode worker takes an image, or one dies with it, the worker that serves the request encodes it
itself. So it is no state of a request's saga, and its failure is no setback.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple

import structlog
from msgspec.structs import replace

from headwater.actors import metrics
from headwater.actors.bus import BusError
from headwater.actors.edge.saga.placement import Addressed, Dispatcher, MessagePlacement
from headwater.actors.http.errors import ApiError
from headwater.router.decision.encode_leg import NOT_APART, LegEstimate, weigh_encoding
from headwater.schemas.constraints import NO_CONSTRAINTS, Constraints
from headwater.schemas.events.request import EncodeOutcome, RequestEncoded
from headwater.schemas.events.route import Decision
from headwater.schemas.hashing import pack_hashes
from headwater.schemas.messages.encode import (
    Declined,
    Encoded,
    EncodeRequest,
    embedding_blocks,
    embedding_hashes,
)
from headwater.schemas.messages.inference import Refused
from headwater.schemas.messages.media import PromptMedia
from headwater.schemas.tables import ENCODE_NEEDS

DECLINE_S_MAX: Final = 1.0
"""The longest time that an encode worker may take to note an image that it should not encode. Nothing waits for it."""

_log = structlog.get_logger("headwater.edge.encode")


class EncodeLeg(NamedTuple):
    """What identifies the request of an encode leg: the `decision`, and the `attempt` that it belongs to."""

    request: str
    choice: int
    attempt: str
    decision: Decision


class Encoders:
    """The encode legs of one request."""

    def __init__(self, dispatcher: Dispatcher, block_size: int) -> None:
        self._dispatcher = dispatcher
        self._workers = dispatcher.workers
        self._clock = dispatcher.clock
        self._block_size = block_size

    async def encode(
        self, leg: EncodeLeg, media: Sequence[PromptMedia], wanted: Constraints = NO_CONSTRAINTS
    ) -> tuple[tuple[PromptMedia, ...], list[RequestEncoded]]:
        """The images, with the embeddings that encode workers offer, and the events to record. May be cancelled.

        `wanted` are the constraints of the request: its encode workers tolerate the same, and process images with the same settings.
        """
        decision = leg.decision
        form = self._workers.embedding_format(
            self._dispatcher.pool, decision.worker, {item.kind for item in media}
        )
        if not form or self._workers.encode_legs == "never":
            return tuple(media), []
        allowed = Constraints(
            pairs_with=form,
            tolerates=wanted.tolerates,
            media_processor=wanted.media_processor,
        )
        cached = decision.chosen.cached_blocks * self._block_size
        images = [
            self._image(leg, number, item, replace(allowed, needs=ENCODE_NEEDS[item.kind]))
            for number, item in enumerate(media)
            # The KV or the embedding of others is there.
            if item.given is None and item.start + item.tokens > cached
        ]
        await asyncio.gather(*(self._find_worker(image) for image in images))
        routed = [(image, image.decision) for image in images if image.decision is not None]
        if routed:
            tokens = [image.item.tokens for image, _ in routed]
            estimate = weigh_encoding(leg.attempt, tokens, [answer for _, answer in routed], decision)
            if self._workers.encode_legs == "always":
                estimate = estimate.forced()
            pairs = zip(routed, estimate.ahead_max, strict=True)
            await asyncio.gather(*(self._encode(image, estimate, ahead) for (image, _), ahead in pairs))
        found = list(media)
        for image in images:
            found[image.number] = image.item
            metrics.ENCODE_LEGS.labels(image.outcome).inc()
        return tuple(found), [image.event() for image in images]

    def _image(self, leg: EncodeLeg, number: int, item: PromptMedia, constraints: Constraints) -> "_Image":
        tokens = embedding_blocks(item, self._block_size) * self._block_size
        hashes = pack_hashes(embedding_hashes(item, self._block_size))
        reader = leg.decision.worker
        message = Addressed(
            leg.attempt, f"e{number}", tokens, constraints, hashes, reader, first=0, waits=False
        )
        return _Image(
            leg, number, item, MessagePlacement(self._dispatcher, message), self._clock.monotonic_s()
        )

    async def _find_worker(self, image: "_Image") -> None:
        """Query the router for an encode worker."""
        try:
            image.decision = await image.placement.find()
        except ApiError:
            image.reason = "no encode worker takes it"
            image.ended_s = self._clock.monotonic_s()

    async def _encode(self, image: "_Image", estimate: LegEstimate, ahead_max: int) -> None:
        image.estimate, image.ahead_max = estimate, ahead_max
        if ahead_max == NOT_APART:
            image.outcome, image.reason = "local", "encoding it there is not expected to be faster"
            self._decline(image)
        else:
            until_s = self._clock.monotonic_s() + estimate.wait_s
            # Where none takes it, the worker that serves the request encodes it: `image` says why.
            with contextlib.suppress(ApiError):
                await image.placement.deliver(partial(self._ask, image, until_s), until_s=until_s)
        image.ended_s = self._clock.monotonic_s()

    async def _ask(
        self, image: "_Image", until_s: float, decision: Decision, attempt: str
    ) -> Encoded | Declined | Refused:
        """Ask an encode worker, and note its answer."""
        image.worker, image.epoch = worker, epoch = decision.worker, decision.epoch
        left_s = until_s - self._clock.monotonic_s()
        try:
            with self._workers.waiting() as waiter:
                request = EncodeRequest(attempt, self._workers.edge, image.item, image.ahead_max, waiter)
                reply = await self._workers.encode(worker, epoch, request, left_s)
        except BusError as error:
            reply = Refused(str(error), True)
        match reply:
            case Encoded():
                image.item = replace(image.item, embedding=reply.embedding)
                image.outcome = "cached" if reply.cached else "computed"
            case Declined():
                image.outcome = "local"
                image.reason = f"{reply.ahead} tokens of other images were ahead of it"
            case Refused():
                image.reason = reply.reason
                _log.info(
                    "image_not_encoded",
                    request=image.leg.request,
                    worker=worker,
                    epoch=epoch,
                    reason=image.reason,
                )
        return reply

    def _decline(self, image: "_Image") -> None:
        """Have the encode worker report that it does not encode the image, which ends what the router counted for it. Does not wait."""
        answer = image.decision
        assert answer is not None
        image.worker, image.epoch = answer.worker, answer.epoch
        request = EncodeRequest(image.placement.attempt, self._workers.edge, image.item, NOT_APART)

        async def send() -> None:
            with contextlib.suppress(BusError):
                await self._workers.encode(answer.worker, answer.epoch, request, DECLINE_S_MAX)

        # An edge that ends sends nothing more.
        with contextlib.suppress(ApiError):
            self._workers.spawn(send(), "decline")


class _Image:
    """An image of a request on its way to an encode worker. `decision` is the first one, which the estimate is for."""

    def __init__(
        self,
        leg: EncodeLeg,
        number: int,
        item: PromptMedia,
        placement: "MessagePlacement[Encoded | Declined]",
        now_s: float,
    ) -> None:
        self.leg = leg
        self.number = number
        self.item = item
        self.placement = placement
        self.decision: Decision | None = None
        self.estimate: LegEstimate | None = None
        self.ahead_max = 0
        self.outcome: EncodeOutcome = "failed"
        self.worker, self.epoch, self.reason = "", 0, ""
        self.began_s = self.ended_s = now_s

    def event(self) -> RequestEncoded:
        """Return the event for the request log: what came of the leg."""
        known = self.estimate
        return RequestEncoded(
            self.leg.request,
            self.leg.choice,
            self.leg.attempt,
            self.item.id,
            self.item.tokens,
            self.outcome,
            self.worker,
            self.epoch,
            round((self.ended_s - self.began_s) * 1000, 3),
            self.reason,
            self.ahead_max,
            round(known.apart_ms, 3) if known is not None else 0.0,
            round(known.here_ms, 3) if known is not None else 0.0,
        )
