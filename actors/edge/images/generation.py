"""One request for images: placed on a worker, followed until it has ended, and its files fetched piece by piece.

If the worker dies, another one generates the images that are still missing; each image reaches the client once.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

import msgspec

from headwater.actors.bus.port import BusError, NoResponder
from headwater.actors.edge.clients.workers import WorkerRegistry
from headwater.actors.edge.model.catalog import Model
from headwater.actors.edge.request.dispatch import Addressed, Dispatcher, NotTaken, WorkerDied
from headwater.actors.edge.request.record import RequestLogWriter
from headwater.actors.edge.request.routing_hints import RoutingHints
from headwater.actors.http.errors import ApiError, overloaded, rejected
from headwater.schemas.constraints import Constraints
from headwater.schemas.events.route import Decision
from headwater.schemas.messages.image_generation import (
    FINAL,
    PIECE_BYTES,
    ImageFile,
    ImagePiece,
    ImagePieceQuery,
    ImageRequest,
    ImageState,
    ImageStateQuery,
)
from headwater.schemas.messages.inference import Refused

DEATHS_MAX: Final = 2
"""Workers that may die with a request: it is tried once more, as a diffusion engine takes minutes to start again."""

UNANSWERED_MAX: Final = 3
"""Queries in a row without an answer after which a worker counts as dead."""

PIECES_AT_ONCE: Final = 4
FILE_BYTES_MAX: Final = 64 << 20


class ImageUpdate(NamedTuple):
    """What is new: a step of image number `image`, or a file if there is `data`."""

    image: int
    steps_done: int
    data: bytes = b""
    preview: int = FINAL


class ImageJob(NamedTuple):
    """What is to be generated. `tokens` are those of the prompt, for the router."""

    order: ImageRequest
    model: Model
    tokens: int
    hints: RoutingHints


TakeUpdate = Callable[[ImageUpdate], Awaitable[None]]


class ImageGeneration:
    """One request. `take` is awaited for each step that was seen, and once for each file."""

    def __init__(self, workers: WorkerRegistry, job: ImageJob, take: TakeUpdate) -> None:
        self._workers = workers
        self._job = job
        self._take = take
        self._images: dict[int, bytes] = {}
        self._previews: set[tuple[int, int]] = set()

    async def run(self, record: RequestLogWriter) -> list[bytes]:
        """The images, as files. Raises `ApiError`. May be cancelled: then its worker stops."""
        order, model = self._job.order, self._job.model
        dispatcher = Dispatcher(self._workers, model.card.pool, self._job.hints)
        constraints = Constraints(needs=("image_generation",))
        message = Addressed(order.request, 0, self._job.tokens, constraints, DEATHS_MAX)
        await dispatcher.place(message, record, self._generate_at)
        return [self._images[number] for number in range(order.count)]

    @property
    def _first(self) -> int:
        """The first image that is missing."""
        return next((n for n in range(self._job.order.count) if n not in self._images), self._job.order.count)

    async def _generate_at(self, decision: Decision, attempt: str) -> NotTaken | None:
        """Have one worker generate what is missing."""
        worker, epoch = decision.worker, decision.epoch
        request = msgspec.structs.replace(self._job.order, request=attempt, first=self._first)
        try:
            refused = await self._workers.start_images(worker, epoch, request)
            if refused is not None:
                return _not_taken(refused)
            return await self._follow(decision, attempt)
        finally:
            # It may compute all the same, or keep files that the edge has.
            self._workers.cancel(worker, epoch, attempt)

    async def _follow(self, decision: Decision, attempt: str) -> NotTaken | None:
        fetched, unanswered, seen = 0, 0, -1
        while True:
            if self._workers.closed:
                raise overloaded("This edge is restarting; retry.", 1.0)
            try:
                state = await self._workers.image_reply(
                    decision.worker, decision.epoch, ImageStateQuery(attempt, seen), ImageState
                )
            except BusError as error:
                unanswered += 1
                if isinstance(error, NoResponder) or unanswered >= UNANSWERED_MAX:
                    raise WorkerDied(f"worker {decision.worker}: {error}") from error
                continue
            unanswered = 0
            if not state.known:
                raise WorkerDied(f"worker {decision.worker} no longer has the request")
            for number in range(fetched, len(state.files)):
                await self._receive(decision, attempt, number, state)
            fetched = len(state.files)
            if state.version != seen:
                await self._take(ImageUpdate(state.image, state.steps_done))
            seen = state.version
            if state.has_ended:
                return _not_taken(state.refused) if state.refused is not None else self._complete(decision)

    def _complete(self, decision: Decision) -> NotTaken | None:
        missing = self._job.order.count - len(self._images)
        return NotTaken(f"worker {decision.worker} gave {missing} images too few") if missing else None

    async def _receive(self, decision: Decision, attempt: str, number: int, state: ImageState) -> None:
        """Fetch a file, unless the client has it already from another worker."""
        file = state.files[number]
        key = (file.image, file.preview)
        if file.image in self._images or key in self._previews or not 0 <= file.image < self._job.order.count:
            return
        data = await self._fetch(decision, attempt, number, file)
        if file.preview == FINAL:
            self._images[file.image] = data
        else:
            self._previews.add(key)
        await self._take(ImageUpdate(file.image, state.steps_done, data, file.preview))

    async def _fetch(self, decision: Decision, attempt: str, number: int, file: ImageFile) -> bytes:
        if file.size > FILE_BYTES_MAX:
            raise ApiError(
                502,
                f"An image has {file.size} bytes; at most {FILE_BYTES_MAX} are accepted. Ask for a smaller size, or jpeg.",
                kind="server_error",
                code="image_too_large",
            )
        places = asyncio.Semaphore(PIECES_AT_ONCE)

        async def piece(offset: int) -> bytes:
            query = ImagePieceQuery(attempt, number, offset, min(PIECE_BYTES, file.size - offset))
            async with places:
                return await self._piece(decision, query)

        try:
            async with asyncio.TaskGroup() as group:
                pieces = [group.create_task(piece(offset)) for offset in range(0, file.size, PIECE_BYTES)]
        except* WorkerDied as errors:
            raise errors.exceptions[0] from None
        return b"".join([one.result() for one in pieces])

    async def _piece(self, decision: Decision, query: ImagePieceQuery) -> bytes:
        """One piece; a message may be lost. Raises `WorkerDied`."""
        reason = ""
        for _ in range(UNANSWERED_MAX):
            try:
                piece = await self._workers.image_reply(decision.worker, decision.epoch, query, ImagePiece)
            except BusError as error:
                reason = str(error)
                if isinstance(error, NoResponder):
                    break
                continue
            if not piece.known or len(piece.data) != query.count:
                reason = "it no longer has the image"
                break
            return piece.data
        raise WorkerDied(f"worker {decision.worker}: {reason}")


def _not_taken(refused: Refused) -> NotTaken:
    """Why a worker refused, for another one. Raises `ApiError` 400 if every other would, and `WorkerDied`."""
    if not refused.retryable:
        raise rejected(refused.reason, refused.param)
    if refused.fatal:
        raise WorkerDied(refused.reason)
    return NotTaken(refused.reason)
