"""Pooling of prompts to vectors: they are cut into messages that workers can answer, each placed by the router like any request.

Every message is a decision of its own in the pool log. A message whose worker refuses it or dies is sent to another
one: pooling keeps no state.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from headwater.actors.bus import BusError
from headwater.actors.edge.model.catalog import Model
from headwater.actors.edge.saga.dispatch import TokenSequence
from headwater.actors.edge.saga.placement import Addressed, Dispatcher, MessagePlacement
from headwater.actors.edge.saga.record import RequestLogWriter
from headwater.actors.edge.saga.routing_hints import NO_HINTS, RoutingHints
from headwater.actors.edge.saga.workers import WorkerRegistry
from headwater.actors.http.errors import bad_request
from headwater.schemas.constraints import Constraints
from headwater.schemas.events.route import Decision
from headwater.schemas.hashing import U32, pack_tokens
from headwater.schemas.messages.inference import Embedded, EmbedRequest, Refused
from headwater.schemas.messages.media import PromptMedia, media_features
from headwater.schemas.tables import required_capabilities
from headwater.schemas.trace import TraceContext

MESSAGE_TOKENS_MAX: Final = 16_384
"""Prompt tokens of one message; a longer prompt goes alone."""

REPLY_BYTES: Final = 512 * 1024
"""Vectors of one reply. A NATS server accepts messages of 1 MiB by default."""

VECTOR_BYTES: Final = 64 * 1024
"""Assumed size of a vector until the first one of the model arrived: 16,384 dimensions."""

CONCURRENT_MESSAGES_MAX: Final = 8
"""Messages of one request in flight."""


class PoolingJob(NamedTuple):
    """Prompts of one request. `segments` and `media` as in `EmbedRequest`; `dimensions` 0: as many as the model has."""

    request: str
    model: Model
    prompts: list[U32]
    task: str
    dimensions: int = 0
    segments: tuple[int, ...] = ()
    hints: RoutingHints = NO_HINTS
    cache_salt: str = ""
    media: tuple[tuple[PromptMedia, ...], ...] = ()


def messages(lengths: Sequence[int], vector_bytes: int, first: int = 0) -> list[range]:
    """Group the prompts from number `first` on into messages, by their lengths in tokens. All of them, in order."""
    several = max(1, REPLY_BYTES // vector_bytes)
    found: list[range] = []
    begin, tokens = first, 0
    for number in range(first, len(lengths)):
        tokens += lengths[number]
        if number > begin and (tokens > MESSAGE_TOKENS_MAX or number - begin >= several):
            found.append(range(begin, number))
            begin, tokens = number, lengths[number]
    if begin < len(lengths):
        found.append(range(begin, len(lengths)))
    return found


class Pooling:
    """The pooling of prompts at one edge. Caches the size of each model's vectors."""

    def __init__(self, workers: WorkerRegistry) -> None:
        self._workers = workers
        self._sizes: dict[tuple[str, str, int], int] = {}

    async def vectors(self, job: PoolingJob, record: RequestLogWriter) -> list[bytes]:
        """One vector (packed little-endian float32) per prompt. Raises `ApiError`. May be cancelled."""
        lengths = [len(prompt) for prompt in job.prompts]
        kind = (job.model.card.pool, job.task, job.dimensions)
        size = self._sizes.get(kind, job.dimensions * 4)
        parts: dict[int, tuple[bytes, ...]] = {}
        plan = messages(lengths, size or VECTOR_BYTES)
        if job.media:
            # Each conversation goes to where its blocks and media are.
            plan = [range(number, number + 1) for number in range(len(lengths))]
        elif not size and len(plan) > 1:
            # The first reply shows how many prompts fit into the others.
            parts[0] = await self._place(job, 0, plan[0], record)
            self._sizes[kind] = max(4, *(len(vector) for vector in parts[0]))
            plan = [plan[0], *messages(lengths, self._sizes[kind], plan[0].stop)]
        left = deque(number for number in range(len(plan)) if number not in parts)

        async def work() -> None:
            while left:
                number = left.popleft()
                parts[number] = await self._place(job, number, plan[number], record)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(CONCURRENT_MESSAGES_MAX, len(left))):
                    group.create_task(work(), name="pool")
        except ExceptionGroup as errors:
            # The first that failed ended the others.
            raise errors.exceptions[0] from None
        return [vector for number in range(len(plan)) for vector in parts[number]]

    async def _place(
        self, job: PoolingJob, number: int, prompts: range, record: RequestLogWriter
    ) -> tuple[bytes, ...]:
        """Send one message to workers until one replies with its vectors."""
        dispatcher = Dispatcher(self._workers, job.model.card.pool, job.hints, record.trace)
        tokens = sum(len(job.prompts[one]) for one in prompts)
        features = media_features(item for one in prompts for item in (job.media[one] if job.media else ()))
        needs = ("embed", *required_capabilities(None, **features))
        constraints = Constraints(
            lora_name=job.model.lora_name,
            needs=needs,
            media_processor=job.model.card.media_processor if any(features.values()) else "",
        )
        hashes = _hashes(job, prompts.start) if job.media else b""
        message = Addressed(job.request, number, tokens, constraints, hashes)

        async def send(decision: Decision, attempt: str) -> tuple[bytes, ...] | Refused:
            record.routed(number, attempt, decision.worker, decision.epoch)
            return await self._embed(job, prompts, decision, attempt, record.trace)

        return await MessagePlacement[tuple[bytes, ...]](dispatcher, message).deliver(send)

    async def _embed(
        self, job: PoolingJob, prompts: range, decision: Decision, attempt: str, trace: TraceContext
    ) -> tuple[bytes, ...] | Refused:
        """The vectors, or why this worker refuses. Raises `ApiError` 400 if every worker would, and `BusError`."""
        request = EmbedRequest(
            attempt,
            tuple(pack_tokens(job.prompts[one]) for one in prompts),
            job.task,
            job.model.lora_name,
            job.dimensions,
            tuple(job.segments[one] for one in prompts) if any(job.segments) else (),
            job.cache_salt,
            media=tuple(job.media[one] for one in prompts) if job.media else (),
            trace=trace,
        )
        worker, epoch = decision.worker, decision.epoch
        try:
            with self._workers.waiting() as waiter:
                request = msgspec.structs.replace(request, waiter=waiter)
                reply = await self._workers.embed(worker, epoch, request)
        except (BusError, asyncio.CancelledError):
            # It may compute all the same.
            self._workers.cancel(worker, epoch, attempt)
            raise
        if not isinstance(reply, Embedded):
            if not reply.retryable:
                raise bad_request(reply.reason)
            return reply
        if len(reply.vectors) != len(prompts) or any(not v or len(v) % 4 for v in reply.vectors):
            reason = f"worker {worker} returned {len(reply.vectors)} vectors for {len(prompts)} prompts"
            return Refused(reason, True)
        return reply.vectors


def _hashes(job: PoolingJob, prompt: int) -> bytes:
    """The packed hashes of a prompt's full blocks, where its engines report which they have."""
    card = job.model.card
    if "kv_events" not in card.capabilities:
        return b""
    sequence = TokenSequence(
        job.prompts[prompt], card.block_size, job.model.lora_name, job.cache_salt, job.media[prompt]
    )
    return sequence.extend([])[1]
