"""The record of a request in the request log and the metrics: accepted, routed, started, how far it got, how it ended."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from typing import Any, Final

import msgspec
import structlog

from headwater.actors import metrics
from headwater.actors.edge.saga.open_requests import OpenRequests
from headwater.actors.http.decoding import whole_body
from headwater.actors.http.errors import ApiError
from headwater.schemas.clock import Clock
from headwater.schemas.constraints import NO_FLOW_CONTROL, FlowControl
from headwater.schemas.events.request import (
    MediaPlace,
    PayloadKind,
    RequestAccepted,
    RequestCheckpoint,
    RequestEncoded,
    RequestEnded,
    RequestEvent,
    RequestPrefilled,
    RequestRouted,
    RequestStarted,
    RequestStepped,
)
from headwater.schemas.failure import failure_place
from headwater.schemas.hashing import pack_tokens, tenant_digest
from headwater.schemas.messages.media import PromptMedia
from headwater.schemas.trace import NO_TRACE, TraceContext

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
        data = whole_body(data)
        return sha256(data).digest() if self._payload_kind == "hashed" else data
