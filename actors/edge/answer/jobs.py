"""Requests whose result is one whole: prompts to pool to vectors, and files to generate, images or a video.

Prompts are cut into messages that workers can answer, each placed by the router like any request. Every message is a decision of its own in the pool
log. A message whose worker refuses it or dies is sent to another one: pooling keeps no state.

A request for files is placed on a worker, followed until it has ended, and its files are fetched piece by piece. If the worker dies, another one
generates the files that are still missing; each file reaches the client once. What one edge placed, another one can follow.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple

import msgspec

from headwater.actors.edge.catalog import Model
from headwater.actors.edge.saga.http_call import NO_HINTS, RoutingHints
from headwater.actors.edge.saga.placement import Addressed, Dispatcher, MessagePlacement, TokenSequence
from headwater.actors.edge.saga.record import RequestLogWriter
from headwater.actors.edge.saga.workers import UNANSWERED_MAX, WorkerLost, WorkerRegistry
from headwater.actors.http.errors import ApiError, bad_request, overloaded, rejected
from headwater.actors.runtime.ports import BusError, NoResponder
from headwater.schemas.hashing import U32, pack_tokens
from headwater.schemas.inference import (
    FINAL,
    PIECE_BYTES,
    Embedded,
    EmbedRequest,
    FilePiece,
    FilePieceQuery,
    FileRequest,
    FileState,
    FileStateQuery,
    GeneratedFile,
    ImageRequest,
    Refused,
)
from headwater.schemas.media import PromptMedia, media_features
from headwater.schemas.names import TraceContext
from headwater.schemas.routing import Constraints, Decision
from headwater.schemas.tables import required_capabilities

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
    ranges: list[range] = []
    begin, tokens = first, 0
    for number in range(first, len(lengths)):
        tokens += lengths[number]
        if number > begin and (tokens > MESSAGE_TOKENS_MAX or number - begin >= several):
            ranges.append(range(begin, number))
            begin, tokens = number, lengths[number]
    if begin < len(lengths):
        ranges.append(range(begin, len(lengths)))
    return ranges


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
        pending = deque(number for number in range(len(plan)) if number not in parts)

        async def work() -> None:
            while pending:
                number = pending.popleft()
                parts[number] = await self._place(job, number, plan[number], record)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(CONCURRENT_MESSAGES_MAX, len(pending))):
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
        tokens = sum(len(job.prompts[index]) for index in prompts)
        features = media_features(
            item for index in prompts for item in (job.media[index] if job.media else ())
        )
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
            tuple(pack_tokens(job.prompts[index]) for index in prompts),
            job.task,
            job.model.lora_name,
            job.dimensions,
            tuple(job.segments[index] for index in prompts) if any(job.segments) else (),
            job.cache_salt,
            media=tuple(job.media[index] for index in prompts) if job.media else (),
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


DEATHS_MAX: Final = 2
"""Workers that may die with a request: it is tried once more, as a diffusion engine takes minutes to start again."""

PIECES_AT_ONCE: Final = 4
FILE_BYTES_MAX: Final = 64 << 20


class FileUpdate(NamedTuple):
    """What is new: a step of file number `number`, or a file if there is `data`."""

    number: int
    steps_done: int
    data: bytes = b""
    preview: int = FINAL


class FileJob(NamedTuple):
    """What to generate. `tokens` are those of the prompt, for the router."""

    order: FileRequest
    pool: str
    tokens: int
    hints: RoutingHints


class PlacedFiles(NamedTuple):
    """A worker's incarnation, and the name by which it has a request."""

    worker: str
    epoch: int
    attempt: str


TakeUpdate = Callable[[FileUpdate], Awaitable[None]]
TakePlace = Callable[[PlacedFiles], Awaitable[None]]


class FileGeneration:
    """One request. `take` is awaited for each step that was seen, and once for each file; `placed` when a worker accepted it."""

    def __init__(
        self,
        workers: WorkerRegistry,
        job: FileJob,
        take: TakeUpdate | None,
        placed: TakePlace | None = None,
        *,
        stays: bool = False,
    ) -> None:
        self.stays = stays
        """True if the worker continues when this generation ends early, for another edge that follows it."""
        self._workers = workers
        self._job = job
        self._take = take
        self._placed = placed
        self._files: dict[int, bytes] = {}
        self._previews: set[tuple[int, int]] = set()

    async def run(self, record: RequestLogWriter, before: PlacedFiles | None = None) -> list[bytes]:
        """The files. `before`: where another edge placed the request; it is followed there first.

        Raises `ApiError`. May be cancelled: then its worker stops, unless it `stays`.
        """
        order = self._job.order
        if before is None or not await self._resume(before):
            dispatcher = Dispatcher(self._workers, self._job.pool, self._job.hints)
            constraints = Constraints(needs=(order.need,))
            message = Addressed(order.request, 0, self._job.tokens, constraints, deaths_max=DEATHS_MAX)

            async def send(decision: Decision, attempt: str) -> Refused | None:
                record.routed(0, attempt, decision.worker, decision.epoch)
                return await self._generate_at(PlacedFiles(decision.worker, decision.epoch, attempt))

            await MessagePlacement[None](dispatcher, message).deliver(send)
        return [self._files[number] for number in range(order.count)]

    @property
    def _first(self) -> int:
        """The first file that is missing."""
        return next((n for n in range(self._job.order.count) if n not in self._files), self._job.order.count)

    async def _resume(self, place: PlacedFiles) -> bool:
        """Follow what another edge placed; False if its worker no longer has it, or did not take it."""
        try:
            refused = await self._follow_at(place)
        except WorkerLost:
            return False
        if refused is not None and not refused.retryable:
            raise rejected(refused.reason, refused.param)
        return refused is None

    async def _generate_at(self, place: PlacedFiles) -> Refused | None:
        """Have one worker generate what is missing."""
        request: FileRequest = msgspec.structs.replace(self._job.order, request=place.attempt)
        if isinstance(request, ImageRequest):
            with self._workers.waiting() as waiter:
                request = msgspec.structs.replace(request, first=self._first, waiter=waiter)
                return await self._start_and_follow(place, request)
        # Another edge follows a video if this one ends.
        return await self._start_and_follow(place, request)

    async def _start_and_follow(self, place: PlacedFiles, request: FileRequest) -> Refused | None:
        try:
            refused = await self._workers.start_files(place.worker, place.epoch, request)
            if refused is not None:
                return refused
            if self._placed is not None:
                await self._placed(place)
        except BaseException:
            # It may compute all the same.
            self._workers.cancel(*place)
            raise
        return await self._follow_at(place)

    async def _follow_at(self, place: PlacedFiles) -> Refused | None:
        """Follow a request to its end. The worker then drops it: it may keep files that this edge has."""
        has_ended = False
        try:
            refusal = await self._follow(place)
            has_ended = True
            return refusal
        except (WorkerLost, ApiError):
            has_ended = not self._workers.closed
            raise
        finally:
            if has_ended or not self.stays:
                self._workers.cancel(*place)

    async def _follow(self, place: PlacedFiles) -> Refused | None:
        fetched, unanswered, seen = 0, 0, -1
        while True:
            if self._workers.closed:
                raise overloaded("This edge is restarting; retry.", 1.0)
            try:
                state = await self._workers.file_reply(
                    place.worker, place.epoch, FileStateQuery(place.attempt, seen), FileState
                )
            except BusError as error:
                unanswered += 1
                if isinstance(error, NoResponder) or unanswered >= UNANSWERED_MAX:
                    raise WorkerLost(f"worker {place.worker}: {error}") from error
                continue
            unanswered = 0
            if not state.known:
                raise WorkerLost(f"worker {place.worker} no longer has the request")
            for number in range(fetched, len(state.files)):
                await self._receive(place, number, state)
            fetched = len(state.files)
            if state.version != seen and self._take is not None:
                await self._take(FileUpdate(state.number, state.steps_done))
            seen = state.version
            if state.has_ended:
                missing = self._job.order.count - len(self._files)
                if missing and state.refused is None:
                    return Refused(f"worker {place.worker} gave {missing} files too few", True)
                return state.refused

    async def _receive(self, place: PlacedFiles, at: int, state: FileState) -> None:
        """Fetch a file, unless the client has it already from another worker."""
        file = state.files[at]
        number, key = file.number, (file.number, file.preview)
        if number in self._files or key in self._previews or not 0 <= number < self._job.order.count:
            return
        data = await self._fetch(place, at, file)
        if file.preview == FINAL:
            self._files[number] = data
        else:
            self._previews.add(key)
        if self._take is not None:
            await self._take(FileUpdate(number, state.steps_done, data, file.preview))

    async def _fetch(self, place: PlacedFiles, at: int, file: GeneratedFile) -> bytes:
        if file.size > FILE_BYTES_MAX:
            kind_name = "An image" if isinstance(self._job.order, ImageRequest) else "A video"
            raise ApiError(
                502,
                f"{kind_name} has {file.size} bytes; at most {FILE_BYTES_MAX} are accepted. Ask for a smaller size.",
                kind="server_error",
                code="file_too_large",
            )
        places = asyncio.Semaphore(PIECES_AT_ONCE)

        async def piece(offset: int) -> bytes:
            query = FilePieceQuery(place.attempt, at, offset, min(PIECE_BYTES, file.size - offset))
            async with places:
                return await self._piece(place, query)

        try:
            async with asyncio.TaskGroup() as group:
                pieces = [group.create_task(piece(offset)) for offset in range(0, file.size, PIECE_BYTES)]
        except* WorkerLost as errors:
            raise errors.exceptions[0] from None
        return b"".join([task.result() for task in pieces])

    async def _piece(self, place: PlacedFiles, query: FilePieceQuery) -> bytes:
        """One piece; a message may be lost. Raises `WorkerLost`."""
        reason = ""
        for _ in range(UNANSWERED_MAX):
            try:
                piece = await self._workers.file_reply(place.worker, place.epoch, query, FilePiece)
            except BusError as error:
                reason = str(error)
                if isinstance(error, NoResponder):
                    break
                continue
            if not piece.known or len(piece.data) != query.count:
                reason = "it no longer has the file"
                break
            return piece.data
        raise WorkerLost(f"worker {place.worker}: {reason}")
