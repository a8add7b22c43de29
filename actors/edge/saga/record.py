"""The record of a request in the request log and the metrics: accepted, routed, started, how far it got, how it ended; and the requests that have not.

An edge that dies leaves requests that were accepted and never ended. The next incarnation of the same name ends them:
it first appends a message of its own, which fences the dead incarnation, then reads back to the position that the dead
one recorded for its open requests, and ends those it finds. So every accepted request has exactly one terminal event,
even if its client never received one.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from typing import Any, Final

import msgspec
import structlog

from headwater.actors import metrics
from headwater.actors.http.errors import ApiError
from headwater.engines.logs import failure_place
from headwater.events.ports import NOTHING, Log
from headwater.events.writer import PENDING_EVENTS_MAX, Writer, stored
from headwater.schemas import subjects
from headwater.schemas.clock import Clock
from headwater.schemas.events import (
    Event,
    MediaPlace,
    PayloadKind,
    RequestAccepted,
    RequestCheckpoint,
    RequestEncoded,
    RequestEnded,
    RequestEvent,
    RequestPrefilled,
    RequestRouted,
    RequestsOpen,
    RequestStarted,
    RequestStepped,
)
from headwater.schemas.hashing import pack_tokens, tenant_digest
from headwater.schemas.media import PromptMedia
from headwater.schemas.names import NO_TRACE, TraceContext
from headwater.schemas.routing import NO_FLOW_CONTROL, FlowControl

NONE_OPEN: Final = -1
ACCEPT_PENDING_MAX: Final = PENDING_EVENTS_MAX * 3 // 4
"""The limit of unwritten events, beyond which no request is accepted, so that terminal events still find room."""

_open_log = structlog.get_logger("headwater.ledger")


class OpenRequests:
    """Writes the request log of one incarnation of an edge."""

    def __init__(
        self, log: Log, ns: str, edge: str, epoch: int, clock: Clock, *, probe_s: float = 0.0
    ) -> None:
        self._log = log
        self._edge = edge
        self._epoch = epoch
        self._clock = clock
        self._open: dict[str, int] = {}
        self._floor: int | None = None
        subject = subjects.request_subject(ns, edge)
        self.writer = Writer(log, subject, edge, epoch, clock, probe_s=probe_s, stamp=self._stamp)

    @property
    def takes_requests(self) -> bool:
        """True while the buffer has room for the events of another request."""
        return self.writer.pending < ACCEPT_PENDING_MAX

    def write(self, event: Event) -> None:
        """Write an event of a request. Never blocks."""
        if not self.writer.offer(event):
            _open_log.error(
                "request_event_lost", event_kind=type(event).__name__, request=getattr(event, "request", "")
            )

    async def open(self) -> int:
        """Fence former incarnations and end the requests that they left open; returns their number.

        The writer's `run` is started by the caller afterwards.
        """
        subject = self.writer.subject
        last = (await self._log.bounds()).last
        before = await self._log.newest(subject)
        since = await self._open_since(before.position) if before != NOTHING else NONE_OPEN
        # Until it is fenced, the former incarnation may append further messages.
        self._floor = since if since != NONE_OPEN else before.position if before != NOTHING else last
        entries = await self.writer.first_entries()
        position = await stored(lambda: self._log.append(*entries), self._clock, subject)
        self.writer.position = position
        open_requests = await self._left_open(self._floor, position)
        self._open = dict.fromkeys(open_requests, self._floor)
        self._floor = None
        for request, tokens in open_requests.items():
            _open_log.warning("request_left_open", request=request, edge=self._edge)
            self.write(RequestEnded(request, "error", tokens, 0, 0, 0.0, 0.0, "the edge that served it died"))
        return len(open_requests)

    async def _open_since(self, position: int) -> int:
        """The position that the newest message of the subject records; the start of the log if that is unreadable."""
        async for piece in self._log.read(position - 1, follow=False):
            for record in piece.records:
                if record.position == position:
                    marks = [event for event in record.batch.events if isinstance(event, RequestsOpen)]
                    return marks[-1].since if marks else NONE_OPEN
        return 0

    async def _left_open(self, since: int, until: int) -> dict[str, int]:
        """Requests that earlier incarnations accepted and did not end, with their last known number of tokens."""
        open_requests: dict[str, int] = {}
        async for piece in self._log.read(since, follow=False):
            for record in piece.records:
                if record.subject != self.writer.subject or record.position > until:
                    continue
                for event in record.batch.events:
                    match event:
                        case RequestAccepted(request=request):
                            open_requests[request] = 0
                        case RequestCheckpoint(request=request, emitted_tokens=tokens) if (
                            request in open_requests
                        ):
                            open_requests[request] = max(open_requests[request], tokens)
                        case RequestEnded(request=request):
                            open_requests.pop(request, None)
                        case _:
                            pass
        return open_requests

    def _stamp(self, events: Sequence[Event]) -> Event:
        """The position of the oldest request that is open after this message."""
        for event in events:
            if isinstance(event, RequestAccepted):
                self._open[event.request] = self.writer.position
            elif isinstance(event, RequestEnded):
                self._open.pop(event.request, None)
        positions = [*self._open.values()] if self._floor is None else [self._floor, *self._open.values()]
        positions = [since for since in positions if since != NONE_OPEN]
        return RequestsOpen(min(positions, default=NONE_OPEN))


CHECKPOINT_TOKENS: Final = 64

_log = structlog.get_logger("headwater.edge")


TIMED: Final = (RequestRouted, RequestEncoded, RequestPrefilled, RequestStepped)
"""Events that get their time when they are written. The saga, which makes them, has no clock; others say it in a field of their own."""


def _ms(seconds: float) -> float:
    """Milliseconds, to the microsecond."""
    return round(seconds * 1000, 3)


class RequestLogWriter:
    """Writes the account of one request. `payload` says what of its body and answers is recorded.

    A request that generates has `answers` choices. For one that pools vectors, which are never recorded, it has none.
    """

    def __init__(
        self,
        ledger: OpenRequests,
        clock: Clock,
        request: str,
        model: str,
        endpoint: str,
        *,
        payload: PayloadKind,
        trace: TraceContext = NO_TRACE,
        arrived_s: float = 0.0,
        answers: int = 0,
    ) -> None:
        self.began_s = clock.monotonic_s()
        self.trace = trace
        self._began_ns = clock.wall_ns()
        self._prepared_s = self.began_s - arrived_s if arrived_s else 0.0
        self._ledger = ledger
        self._clock = clock
        self._request = request
        self._model = model
        self._endpoint = endpoint
        self._payload_kind: PayloadKind = payload
        self._prompt_tokens = 0
        self._tenant = ""
        self._checkpoints = [0] * answers
        self._answers: list[list[str]] = [[] for _ in range(answers)]
        self._routes: dict[int, int] = {}
        self._ended = False

    def accepted(
        self,
        prompt_tokens: int,
        choices: int,
        body: bytes,
        *,
        max_tokens: int = 0,
        stream: bool = False,
        media: Sequence[PromptMedia] = (),
        flow: FlowControl = NO_FLOW_CONTROL,
        media_s: float = 0.0,
    ) -> None:
        """The edge must end this request, whatever happens. `choices` counts prompts where it pools; `media` is the first one's.

        `flow` says for whom it waits for a worker, and with which priority. `media_s` is how long it took to fetch and decode its media.
        """
        self._prompt_tokens = prompt_tokens
        self._tenant = flow.tenant
        metrics.ACTIVE.inc()
        _log.debug(
            "request_accepted", model=self._model, endpoint=self._endpoint, prompt_tokens=prompt_tokens
        )
        self.write(
            RequestAccepted(
                self._request,
                self._model,
                self._endpoint,
                prompt_tokens,
                max_tokens,
                stream,
                choices,
                self._payload_kind,
                self._payload(body),
                media=tuple(
                    [
                        MediaPlace(item.kind, item.id, item.start, item.tokens)
                        for item in media
                        if item.kind != "recording"
                    ]
                ),
                trace=self.trace.trace,
                tenant=tenant_digest(flow.tenant),
                priority=flow.priority,
                span=self.trace.span,
                sampled=self.trace.sampled,
                trace_state=self.trace.state,
                began_ns=self._began_ns,
                prepare_ms=_ms(self._prepared_s),
                media_ms=_ms(media_s),
            )
        )

    @property
    def log_fields(self) -> dict[str, Any]:
        """The fields that log lines about the request have; that of its trace is a function."""
        return {"request": self._request, "trace": partial(self.trace.trace_of, self._request)}

    def routed(self, message: int, attempt: str, worker: str, epoch: int) -> None:
        """A message of prompts to pool was sent to a worker; from its second time on it counts as migrated."""
        self._routes[message] = self._routes.get(message, 0) + 1
        self.write(RequestRouted(self._request, message, attempt, worker, epoch, 0))

    def started(self, choice: int, worker: str, epoch: int, cached_tokens: int) -> None:
        """The first tokens of a choice arrived."""
        self.write(RequestStarted(self._request, choice, worker, epoch, cached_tokens, self._after_ms()))

    def generated(self, choice: int, emitted: Sequence[int], text: str) -> None:
        """A choice has the tokens `emitted` by now, and its client was sent `text` for the new ones."""
        if text and self._payload_kind != "off":
            self._answers[choice].append(text)
        total, marked = len(emitted), self._checkpoints[choice]
        if total - marked >= CHECKPOINT_TOKENS:
            new = pack_tokens(emitted[marked:]) if self._payload_kind == "full" else b""
            self._checkpoints[choice] = total
            self.write(RequestCheckpoint(self._request, choice, total, new))

    def ended(
        self,
        reason: str,
        error: str,
        *,
        completion_tokens: int = 0,
        cached_tokens: int = 0,
        migrations: int = 0,
        ttft_s: float = 0.0,
    ) -> None:
        """The one terminal event. A second call is a programming error and raises."""
        if self._ended:
            raise RuntimeError(f"{self._request} ended twice")
        self._ended = True
        duration_s = self._clock.monotonic_s() - self.began_s
        _log.debug("request_ended", reason=reason, error=error, seconds=round(duration_s, 3))
        migrations += sum([routes - 1 for routes in self._routes.values()])
        answers: tuple[bytes, ...] = ()
        if self._payload_kind != "off":
            answers = tuple([self._payload("".join(parts).encode()) for parts in self._answers])
        self.write(
            RequestEnded(
                self._request,
                reason,
                completion_tokens,
                cached_tokens,
                migrations,
                _ms(ttft_s),
                _ms(duration_s),
                error,
                self._payload_kind,
                answers,
            )
        )
        metrics.ACTIVE.dec()
        counted = metrics.model_metrics(self._model)
        counted.ended(self._endpoint, reason).inc()
        counted.prompt_tokens.inc(self._prompt_tokens)
        if cached_tokens:
            counted.cached_tokens.inc(cached_tokens)
        counted.completion_tokens.inc(completion_tokens)
        if migrations:
            counted.migrations.inc(migrations)
        counted.request_seconds.observe(duration_s)
        if ttft_s:
            counted.ttft_seconds.observe(ttft_s)
            # Choices run side by side.
            tokens = completion_tokens / max(1, len(self._answers))
            if tokens > 1:
                counted.token_seconds.observe((duration_s - ttft_s) / (tokens - 1))
        metrics.TENANTS.ended(self._tenant, reason, self._prompt_tokens, cached_tokens, completion_tokens)

    @contextmanager
    def ending(self, abandoned: type[Exception]) -> Iterator[None]:
        """Record how the work within ends: well, with the error that it raises, or cancelled, as by `abandoned`."""
        reason, why = "cancelled", ""
        try:
            yield
            reason = "stop"
        except abandoned as error:
            why = str(error)
            raise
        except Exception as error:
            reason, why = "error", error.logged if isinstance(error, ApiError) else failure_place(error)
            raise
        finally:
            self.ended(reason, why)

    def write(self, event: RequestEvent) -> None:
        """Write any event of the request. Never blocks."""
        if isinstance(event, TIMED):
            event = msgspec.structs.replace(event, after_ms=self._after_ms())
        self._ledger.write(event)

    def _after_ms(self) -> float:
        return _ms(self._clock.monotonic_s() - self.began_s)

    def _payload(self, data: bytes) -> bytes:
        if self._payload_kind == "off":
            return b""
        return sha256(data).digest() if self._payload_kind == "hashed" else data
