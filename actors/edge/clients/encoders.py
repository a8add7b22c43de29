"""Images of a request, sent to encode workers before the request is dispatched.

The encode leg can only save time: where no encode worker takes an image, or one dies with it, the worker that serves the request encodes it
itself. So it is no state of a request's saga, and its failure is no setback.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple

import msgspec
import structlog

from headwater.actors import metrics
from headwater.actors.bus.port import BusError
from headwater.actors.edge.clients.workers import WorkerRegistry
from headwater.schemas.clock import Clock
from headwater.schemas.constraints import Constraints
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

TRIES_MAX: Final = 2
"""Encode workers that are tried for an image."""

DELAY_WEIGHT: Final = 0.25
"""What a millisecond of delay of a request that runs counts against a millisecond in which this one waits for its first token."""

_log = structlog.get_logger("headwater.edge.encode")

RouteImage = Callable[[str, Constraints, int, bytes], Awaitable[Decision | None]]
"""Queries the router for an image: (attempt, constraints, tokens, packed block hashes)."""


class EncodeLeg(NamedTuple):
    """Where a request is to be dispatched: the `decision`, of which it is an `attempt`."""

    request: str
    choice: int
    attempt: str
    decision: Decision


class Encoders:
    """One per request."""

    def __init__(
        self, workers: WorkerRegistry, clock: Clock, route: RouteImage, pool: str, block_size: int
    ) -> None:
        self._workers = workers
        self._clock = clock
        self._route = route
        self._pool = pool
        self._block_size = block_size

    async def encode(
        self, leg: EncodeLeg, media: Sequence[PromptMedia], tolerates: tuple[str, ...] = ()
    ) -> tuple[tuple[PromptMedia, ...], list[RequestEncoded]]:
        """The images, with the embeddings that encode workers offer, and what is to be recorded. May be cancelled."""
        decision = leg.decision
        if not self._workers.encodes_for(self._pool, decision.worker):
            return tuple(media), []
        cached = decision.chosen.cached_blocks * self._block_size
        events: list[RequestEncoded] = []

        async def one(number: int, item: PromptMedia) -> PromptMedia:
            if item.given is not None or item.start + item.tokens <= cached:
                # Its embedding is there, or its KV, so that it is not needed.
                return item
            found, event = await self._encode(leg, number, item, tolerates)
            events.append(event)
            metrics.ENCODE_LEGS.labels(event.outcome).inc()
            return found

        found = await asyncio.gather(*(one(number, item) for number, item in enumerate(media)))
        return tuple(found), events

    async def _encode(
        self, leg: EncodeLeg, number: int, item: PromptMedia, tolerates: tuple[str, ...]
    ) -> tuple[PromptMedia, RequestEncoded]:
        began_s = self._clock.monotonic_s()
        excluded: tuple[str, ...] = ()
        worker, epoch, reason = "", 0, ""
        ahead_max = tokens_ahead_max(item.tokens, leg.decision)

        def event(outcome: EncodeOutcome) -> RequestEncoded:
            took_ms = round((self._clock.monotonic_s() - began_s) * 1000, 3)
            return RequestEncoded(
                leg.request,
                leg.choice,
                leg.attempt,
                item.id,
                item.tokens,
                outcome,
                worker,
                epoch,
                took_ms,
                reason,
                ahead_max,
            )

        for attempt in range(TRIES_MAX):
            name = f"{leg.attempt}-e{number}-{attempt}"
            constraints = Constraints(needs=("encode",), exclude=excluded, tolerates=tolerates)
            tokens = embedding_blocks(item, self._block_size) * self._block_size
            hashes = pack_hashes(embedding_hashes(item, self._block_size))
            decision = await self._route(name, constraints, tokens, hashes)
            if decision is None:
                reason = reason or "no encode worker takes it"
                break
            worker, epoch = decision.worker, decision.epoch
            request = EncodeRequest(name, self._workers.edge, item, ahead_max)
            try:
                reply = await self._workers.encode(worker, epoch, request)
            except BusError as error:
                reason = str(error)
            else:
                if isinstance(reply, Encoded):
                    found = msgspec.structs.replace(item, embedding=reply.embedding)
                    return found, event("cached" if reply.cached else "computed")
                if isinstance(reply, Declined):
                    reason = f"{reply.ahead} tokens of other images were ahead of it"
                    return item, event("local")
                reason = reply.reason
                if not reply.retryable:
                    break
            _log.info("image_not_encoded", request=leg.request, worker=worker, epoch=epoch, reason=reason)
            excluded = (*excluded, f"{worker}.{epoch}")
        return item, event("failed")


def tokens_ahead_max(tokens: int, serving: Decision) -> int:
    """Tokens of other images that may be ahead of one with `tokens` at an encode worker, before the serving worker is the better one.

    Both encode at the same pace. On the serving worker that takes the image's own time, in which it also delays the requests that run
    there: image x (1 + `DELAY_WEIGHT` x requests). On the encode worker it takes ahead + image.
    """
    return int(tokens * DELAY_WEIGHT * serving.chosen.requests)
