"""One request for files, images or a video: placed on a worker, followed until it has ended, and its files fetched piece by piece.

If the worker dies, another one generates the files that are still missing; each file reaches the client once. What one edge
placed, another one can follow.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

import msgspec

from headwater.actors.bus import BusError, NoResponder
from headwater.actors.edge.saga.placement import Addressed, Dispatcher, MessagePlacement
from headwater.actors.edge.saga.record import RequestLogWriter
from headwater.actors.edge.saga.routing_hints import RoutingHints
from headwater.actors.edge.saga.workers import UNANSWERED_MAX, WorkerLost, WorkerRegistry
from headwater.actors.http.errors import ApiError, overloaded, rejected
from headwater.schemas.constraints import Constraints
from headwater.schemas.events.route import Decision
from headwater.schemas.messages.file_generation import (
    FINAL,
    PIECE_BYTES,
    FilePiece,
    FilePieceQuery,
    FileRequest,
    FileState,
    FileStateQuery,
    GeneratedFile,
    ImageRequest,
)
from headwater.schemas.messages.inference import Refused

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
        take: TakeUpdate,
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
            left = await self._follow(place)
            has_ended = True
            return left
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
            if state.version != seen:
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
        await self._take(FileUpdate(number, state.steps_done, data, file.preview))

    async def _fetch(self, place: PlacedFiles, at: int, file: GeneratedFile) -> bytes:
        if file.size > FILE_BYTES_MAX:
            what = "An image" if isinstance(self._job.order, ImageRequest) else "A video"
            raise ApiError(
                502,
                f"{what} has {file.size} bytes; at most {FILE_BYTES_MAX} are accepted. Ask for a smaller size.",
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
        return b"".join([one.result() for one in pieces])

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
