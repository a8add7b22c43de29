"""Prompts to vectors: cut into messages that workers can answer, each placed by the router like any request.

Every message is a decision of its own in the pool log. A worker that refuses it or dies under it costs nothing but
time: pooling keeps no state, so the message goes to another one.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from headwater.actors.bus_port import BusError, NoResponder
from headwater.actors.edge.errors import bad_request, overloaded, refused_by_router, upstream_failed
from headwater.actors.edge.fleet import Fleet
from headwater.actors.edge.models import Model
from headwater.actors.edge.wishes import Wishes
from headwater.schemas.hashing import U32, pack_tokens
from headwater.schemas.inference import Embedded, EmbedRequest
from headwater.schemas.route import Decision, RouteQuery, RouteRefused

MESSAGE_TOKENS_MAX: Final = 16_384
"""Prompt tokens of one message; a longer prompt goes alone."""

REPLY_BYTES: Final = 512 * 1024
"""Vectors of one answer. A NATS server takes messages of 1 MiB by default."""

VECTOR_BYTES: Final = 64 * 1024
"""What a vector may have while none of the model's was seen: 16,384 dimensions."""

UNDER_WAY_MAX: Final = 8
"""Messages of one request at once."""

LOST_MAX: Final = 5
"""Workers lost with one message, after which it is taken for the cause."""

PLACE_S_MAX: Final = 10.0
PAUSE_S: Final = 0.1
PAUSE_S_MAX: Final = 2.0


class Job(NamedTuple):
    """Prompts of one request. `segments` as in `EmbedRequest`; `dimensions` 0: as the model gives them."""

    request: str
    model: Model
    prompts: list[U32]
    task: str
    dimensions: int = 0
    segments: tuple[int, ...] = ()
    wishes: Wishes = Wishes()


Routed = Callable[[int, str, str, int], None]
"""Told of each placement: number of the message, attempt, worker, epoch."""


def messages(lengths: Sequence[int], vector_bytes: int, first: int = 0) -> list[range]:
    """Which prompts from number `first` on travel together, by their lengths in tokens. All of them, in order."""
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
    """One for an edge. Remembers how large each model's vectors are."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._sizes: dict[tuple[str, str, int], int] = {}

    async def vectors(self, job: Job, routed: Routed) -> list[bytes]:
        """One vector (packed little-endian float32) per prompt. Raises `ApiError`. May be cancelled."""
        lengths = [len(prompt) for prompt in job.prompts]
        kind = (job.model.card.pool, job.task, job.dimensions)
        size = self._sizes.get(kind, job.dimensions * 4)
        parts: dict[int, tuple[bytes, ...]] = {}
        plan = messages(lengths, size or VECTOR_BYTES)
        if not size and len(plan) > 1:
            # The first answer tells how many prompts fit into the others.
            parts[0] = await self._have(job, 0, plan[0], routed)
            self._sizes[kind] = max(4, *(len(vector) for vector in parts[0]))
            plan = [plan[0], *messages(lengths, self._sizes[kind], plan[0].stop)]
        left = deque(number for number in range(len(plan)) if number not in parts)

        async def work() -> None:
            while left:
                number = left.popleft()
                parts[number] = await self._have(job, number, plan[number], routed)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(UNDER_WAY_MAX, len(left))):
                    group.create_task(work(), name="pool")
        except ExceptionGroup as errors:
            # The first that failed ended the others.
            raise errors.exceptions[0] from None
        return [vector for number in range(len(plan)) for vector in parts[number]]

    async def _have(self, job: Job, number: int, prompts: range, routed: Routed) -> tuple[bytes, ...]:
        """Place one message until a worker answers it."""
        clock = self._fleet.world.clock
        began_s = clock.monotonic_s()
        deadline = began_s + PLACE_S_MAX
        tokens = sum(len(job.prompts[one]) for one in prompts)
        exclude: list[str] = []
        reason, retry_after_s, pause_s = "no router answers", 1.0, PAUSE_S
        asked = lost = 0
        had_worker = False
        while True:
            if self._fleet.closed:
                raise overloaded("This edge starts again.", 1.0)
            asked += 1
            attempt = f"{job.request}-{number}-{asked}"
            query = RouteQuery(
                attempt,
                tokens,
                0,
                b"",
                exclude=tuple(exclude),
                lora_name=job.model.lora_name,
                needs=("embed",),
            )
            asked_s = clock.monotonic_s()
            query = job.wishes.put_into(query, passed_s=asked_s - began_s, waits=not had_worker)
            decision = await self._route(job, query)
            deadline += self._fleet.routing.waited_s(asked_s)
            if isinstance(decision, RouteRefused):
                if decision.for_good:
                    raise refused_by_router(decision)
                # There is nobody but those that would not take it: they may do by now.
                if not exclude:
                    reason, retry_after_s = decision.reason, decision.retry_after_s
                exclude.clear()
                if clock.monotonic_s() >= deadline:
                    raise overloaded(f"No worker could take the request: {reason}.", retry_after_s)
                await clock.sleep(pause_s)
                pause_s = min(2 * pause_s, PAUSE_S_MAX)
                continue
            had_worker = True
            routed(number, attempt, decision.worker, decision.epoch)
            try:
                answer = await self._ask(job, prompts, decision, attempt)
            except BusError as error:
                # Where nobody was there the message can not have been the cause.
                lost += not isinstance(error, NoResponder)
                answer = str(error)
                if lost >= LOST_MAX:
                    raise upstream_failed(
                        f"{lost} workers were lost with the request; last: {error}."
                    ) from error
            if not isinstance(answer, str):
                return answer
            reason = answer
            exclude.append(f"{decision.worker}.{decision.epoch}")

    async def _route(self, job: Job, query: RouteQuery) -> Decision | RouteRefused:
        try:
            return await self._fleet.routing.route(job.model.card.pool, query)
        except BusError as error:
            return RouteRefused(f"no router answers ({error})", 1.0)

    async def _ask(
        self, job: Job, prompts: range, decision: Decision, attempt: str
    ) -> tuple[bytes, ...] | str:
        """The vectors, or why this worker does not give them. Raises `ApiError` 400 if no other would, `BusError`."""
        request = EmbedRequest(
            attempt,
            tuple(pack_tokens(job.prompts[one]) for one in prompts),
            job.task,
            job.model.lora_name,
            job.dimensions,
            tuple(job.segments[one] for one in prompts) if any(job.segments) else (),
        )
        worker, epoch = decision.worker, decision.epoch
        try:
            reply = await self._fleet.asking.embed(worker, epoch, request)
        except (BusError, asyncio.CancelledError):
            # It may compute all the same: nobody wants it any more.
            self._fleet.cancel(worker, epoch, attempt)
            raise
        if not isinstance(reply, Embedded):
            if not reply.retryable:
                raise bad_request(reply.reason)
            return reply.reason
        if len(reply.vectors) != len(prompts) or any(not v or len(v) % 4 for v in reply.vectors):
            return f"worker {worker} gave {len(reply.vectors)} vectors for {len(prompts)} prompts"
        return reply.vectors
