"""Images of a request, sent to encode workers before the request is dispatched.

The encode leg can only save time: where no encode worker takes an image, or one dies with it, the worker that serves the request encodes it
itself. So it is no state of a request's saga, and its failure is no setback.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple

import msgspec
import structlog

from headwater.actors import metrics
from headwater.actors.bus import BusError
from headwater.actors.edge.saga.workers import WorkerRegistry
from headwater.actors.http.errors import ApiError
from headwater.router.decision.encode_leg import NOT_APART, LegEstimate, weigh_encoding
from headwater.schemas.clock import Clock
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
from headwater.schemas.messages.media import PromptMedia
from headwater.schemas.tables import ENCODE_NEEDS

TRIES_MAX: Final = 2
"""Encode workers that are tried for an image."""

DECLINE_S_MAX: Final = 1.0
"""The longest time that an encode worker may take to note an image that it should not encode. Nothing waits for it."""

_log = structlog.get_logger("headwater.edge.encode")

RouteImage = Callable[[str, Constraints, int, bytes, str], Awaitable[Decision | None]]
"""Queries the router for an image: (attempt, constraints, tokens, packed block hashes, worker that reads the embedding)."""


class EncodeLeg(NamedTuple):
    """What identifies the request of an encode leg: the `decision`, and the `attempt` that it belongs to."""

    request: str
    choice: int
    attempt: str
    decision: Decision


class Encoders:
    """The encode legs of one request."""

    def __init__(
        self, workers: WorkerRegistry, clock: Clock, route: RouteImage, pool: str, block_size: int
    ) -> None:
        self._workers = workers
        self._clock = clock
        self._route = route
        self._pool = pool
        self._block_size = block_size

    async def encode(
        self, leg: EncodeLeg, media: Sequence[PromptMedia], wanted: Constraints = NO_CONSTRAINTS
    ) -> tuple[tuple[PromptMedia, ...], list[RequestEncoded]]:
        """The images, with the embeddings that encode workers offer, and the events to record. May be cancelled.

        `wanted` are the constraints of the request: its encode workers tolerate the same, and process images with the same settings.
        """
        decision = leg.decision
        form = self._workers.embedding_format(self._pool, decision.worker, {item.kind for item in media})
        if not form or self._workers.encode_legs == "never":
            return tuple(media), []
        allowed = Constraints(
            pairs_with=form,
            tolerates=wanted.tolerates,
            media_processor=wanted.media_processor,
        )
        cached = decision.chosen.cached_blocks * self._block_size
        images = [
            _Image(
                leg,
                number,
                item,
                msgspec.structs.replace(allowed, needs=ENCODE_NEEDS[item.kind]),
                self._clock.monotonic_s(),
            )
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

    async def _find_worker(self, image: "_Image") -> None:
        """Query the router for an encode worker that has not failed with this image."""
        item = image.item
        tokens = embedding_blocks(item, self._block_size) * self._block_size
        hashes = pack_hashes(embedding_hashes(item, self._block_size))
        constraints = msgspec.structs.replace(image.allowed, exclude=image.excluded)
        reader = image.leg.decision.worker
        image.decision = await self._route(image.name, constraints, tokens, hashes, reader)
        if image.decision is None:
            image.reason = image.reason or "no encode worker takes it"
            image.ended_s = self._clock.monotonic_s()

    async def _encode(self, image: "_Image", estimate: LegEstimate, ahead_max: int) -> None:
        image.estimate, image.ahead_max = estimate, ahead_max
        if ahead_max == NOT_APART:
            image.outcome, image.reason = "local", "encoding it there is not expected to be faster"
            self._decline(image)
        else:
            until_s = self._clock.monotonic_s() + estimate.wait_s
            while image.decision is not None and not await self._ask(image, until_s):
                left_s = until_s - self._clock.monotonic_s()
                if image.tries >= TRIES_MAX or left_s <= 0:
                    break
                await self._find_worker(image)
        image.ended_s = self._clock.monotonic_s()

    async def _ask(self, image: "_Image", until_s: float) -> bool:
        """Ask the encode worker that the router named. False: another one may be asked."""
        answer, leg = image.decision, image.leg
        assert answer is not None
        image.worker, image.epoch = answer.worker, answer.epoch
        left_s = until_s - self._clock.monotonic_s()
        try:
            with self._workers.waiting() as waiter:
                request = EncodeRequest(image.name, self._workers.edge, image.item, image.ahead_max, waiter)
                reply = await self._workers.encode(answer.worker, answer.epoch, request, left_s)
        except BusError as error:
            image.reason, is_final = str(error), False
        else:
            if isinstance(reply, Encoded):
                image.item = msgspec.structs.replace(image.item, embedding=reply.embedding)
                image.outcome = "cached" if reply.cached else "computed"
                return True
            if isinstance(reply, Declined):
                image.outcome = "local"
                image.reason = f"{reply.ahead} tokens of other images were ahead of it"
                return True
            image.reason, is_final = reply.reason, not reply.retryable
        _log.info(
            "image_not_encoded",
            request=leg.request,
            worker=answer.worker,
            epoch=answer.epoch,
            reason=image.reason,
        )
        image.tries += 1
        image.excluded = (*image.excluded, f"{answer.worker}.{answer.epoch}")
        return is_final

    def _decline(self, image: "_Image") -> None:
        """Have the encode worker report that it does not encode the image, which ends what the router counted for it. Does not wait."""
        answer = image.decision
        assert answer is not None
        image.worker, image.epoch = answer.worker, answer.epoch
        request = EncodeRequest(image.name, self._workers.edge, image.item, NOT_APART)

        async def send() -> None:
            with contextlib.suppress(BusError):
                await self._workers.encode(answer.worker, answer.epoch, request, DECLINE_S_MAX)

        # An edge that ends sends nothing more.
        with contextlib.suppress(ApiError):
            self._workers.spawn(send(), "decline")


class _Image:
    """An image of a request on its way to an encode worker: `tries` have failed, those of the workers in `excluded`."""

    def __init__(
        self, leg: EncodeLeg, number: int, item: PromptMedia, allowed: Constraints, now_s: float
    ) -> None:
        self.leg = leg
        self.number = number
        self.item = item
        self.allowed = allowed
        self.tries = 0
        self.excluded: tuple[str, ...] = ()
        self.decision: Decision | None = None
        self.estimate: LegEstimate | None = None
        self.ahead_max = 0
        self.outcome: EncodeOutcome = "failed"
        self.worker, self.epoch, self.reason = "", 0, ""
        self.began_s = self.ended_s = now_s

    @property
    def name(self) -> str:
        """The name of the present try."""
        return f"{self.leg.attempt}-e{self.number}-{self.tries}"

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
