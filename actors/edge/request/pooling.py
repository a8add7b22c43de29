"""Prompts to vectors: cut into messages that workers can answer, each placed by the router like any request.

Every message is a decision of its own in the pool log. A message whose worker refuses it or dies is sent to another
one: pooling keeps no state.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

import structlog

from headwater.actors.bus.port import BusError, NoResponder
from headwater.actors.edge.clients.workers import WorkerRegistry
from headwater.actors.edge.model.catalog import Model
from headwater.actors.edge.request.dispatch import Dispatcher
from headwater.actors.edge.request.migration import DEATHS_MAX
from headwater.actors.edge.request.placement import PLACE_S_MAX, Placement
from headwater.actors.edge.request.record import RequestLogWriter
from headwater.actors.edge.request.routing_hints import NO_HINTS, RoutingHints
from headwater.actors.edge.request.saga_types import AskRouter
from headwater.actors.http.errors import bad_request, ended_workers, overloaded, refused_by_router
from headwater.schemas.constraints import Constraints
from headwater.schemas.events.route import Decision
from headwater.schemas.hashing import U32, pack_tokens
from headwater.schemas.messages.inference import Embedded, EmbedRequest

MESSAGE_TOKENS_MAX: Final = 16_384
"""Prompt tokens of one message; a longer prompt goes alone."""

REPLY_BYTES: Final = 512 * 1024
"""Vectors of one reply. A NATS server accepts messages of 1 MiB by default."""

VECTOR_BYTES: Final = 64 * 1024
"""Assumed size of a vector until the first one of the model arrived: 16,384 dimensions."""

CONCURRENT_MESSAGES_MAX: Final = 8
"""Messages of one request in flight."""

PAUSE_S: Final = 0.1
PAUSE_S_MAX: Final = 2.0
"""Pauses between two queries, doubled from the first value to the last, while the router names no worker."""


_log = structlog.get_logger("headwater.edge")


class _EngineDied(Exception):
    """The worker's engine has died of the message."""


class PoolingJob(NamedTuple):
    """Prompts of one request. `segments` as in `EmbedRequest`; `dimensions` 0: as many as the model has."""

    request: str
    model: Model
    prompts: list[U32]
    task: str
    dimensions: int = 0
    segments: tuple[int, ...] = ()
    hints: RoutingHints = NO_HINTS
    cache_salt: str = ""


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
    """One per edge. Caches the size of each model's vectors."""

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
        if not size and len(plan) > 1:
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
        clock = self._workers.ports.clock
        card = job.model.card
        dispatcher = Dispatcher(self._workers, card.pool, job.hints)
        placement = Placement(clock.monotonic_s() + PLACE_S_MAX)
        tokens = sum(len(job.prompts[one]) for one in prompts)
        pause_s = PAUSE_S
        attempts = lost = 0
        was_routed = False
        while True:
            if self._workers.closed:
                raise overloaded("This edge is restarting; retry.", 1.0)
            attempts += 1
            attempt = f"{job.request}-{number}-{attempts}"
            constraints = Constraints(
                exclude=placement.exclude, lora_name=job.model.lora_name, needs=("embed",)
            )
            ask = AskRouter(attempts, attempt, constraints, may_wait=not was_routed)
            reply, failure, waited_s = await dispatcher.route(ask, tokens, 0)
            placement = placement.extend(waited_s)
            if not isinstance(reply, Decision):
                if reply is None:
                    placement = placement.unanswered(failure)
                elif reply.for_good:
                    raise refused_by_router(reply)
                else:
                    placement = placement.refused_by_router(reply)
                error = placement.expired(clock.monotonic_s())
                if error is not None:
                    raise error
                await clock.sleep(pause_s)
                pause_s = min(2 * pause_s, PAUSE_S_MAX)
                continue
            was_routed = True
            record.routed(number, attempt, reply.worker, reply.epoch)
            try:
                answer = await self._embed(job, prompts, reply, attempt)
            except BusError as failed:
                # A message that no process received cannot have been the cause.
                lost += not isinstance(failed, NoResponder)
                answer = str(failed)
            except _EngineDied as failed:
                lost += 1
                answer = str(failed)
            if not isinstance(answer, str):
                return answer
            if lost >= DEATHS_MAX:
                _log.error(
                    "request_ended_workers", request=job.request, choice=number, workers=lost, reason=answer
                )
                raise ended_workers(lost, answer)
            placement = placement.refused_by_worker(reply.worker, reply.epoch, answer)

    async def _embed(
        self, job: PoolingJob, prompts: range, decision: Decision, attempt: str
    ) -> tuple[bytes, ...] | str:
        """The vectors, or why this worker refuses.

        Raises `ApiError` 400 if every worker would, `BusError`, and `_EngineDied`.
        """
        request = EmbedRequest(
            attempt,
            tuple(pack_tokens(job.prompts[one]) for one in prompts),
            job.task,
            job.model.lora_name,
            job.dimensions,
            tuple(job.segments[one] for one in prompts) if any(job.segments) else (),
            job.cache_salt,
        )
        worker, epoch = decision.worker, decision.epoch
        try:
            reply = await self._workers.embed(worker, epoch, request)
        except (BusError, asyncio.CancelledError):
            # It may compute all the same.
            self._workers.cancel(worker, epoch, attempt)
            raise
        if not isinstance(reply, Embedded):
            if not reply.retryable:
                raise bad_request(reply.reason)
            if reply.fatal:
                raise _EngineDied(reply.reason)
            return reply.reason
        if len(reply.vectors) != len(prompts) or any(not v or len(v) % 4 for v in reply.vectors):
            return f"worker {worker} returned {len(reply.vectors)} vectors for {len(prompts)} prompts"
        return reply.vectors
