"""What one request leaves in the request log: when it was taken, placed, started, how far it got, how it ended."""

from collections.abc import Sequence
from hashlib import sha256
from typing import Final

from headwater.actors.edge.ledger import Ledger
from headwater.actors.edge.saga import Saga
from headwater.schemas.hashing import pack_tokens
from headwater.schemas.request import (
    PayloadKind,
    RequestAccepted,
    RequestCheckpoint,
    RequestEnded,
    RequestEvent,
    RequestPrefilled,
    RequestRouted,
    RequestStarted,
    RequestStepped,
    SagaState,
)

CHECKPOINT_TOKENS: Final = 64
REASON_CHARACTERS_MAX: Final = 300


class RequestRecord:
    """The account of one request. `kind` says what of its payload is recorded."""

    def __init__(self, ledger: Ledger, request: str, kind: PayloadKind, trace: str, choices: int) -> None:
        self._ledger = ledger
        self._request = request
        self._kind: PayloadKind = kind
        self._trace = trace
        self._marked = [0] * choices
        self._answers: list[list[str]] = [[] for _ in range(choices)]
        self._ended = False

    def accepted(
        self, model: str, endpoint: str, prompt_tokens: int, max_tokens: int, stream: bool, body: bytes
    ) -> None:
        """The edge owes this request an end from here on."""
        self._write(
            RequestAccepted(
                self._request,
                model,
                endpoint,
                prompt_tokens,
                max_tokens,
                stream,
                len(self._marked),
                self._kind,
                self._payload(body),
            )
        )

    def routed(self, saga: Saga) -> None:
        """A worker took a choice, the rest of it, or its prompt."""
        holder = saga.holder
        handoff = holder.handoff.id if saga.leg == "decode" and holder and holder.handoff else ""
        self._write(
            RequestRouted(
                self._request,
                saga.index,
                saga.attempt,
                saga.worker,
                saga.epoch,
                len(saga.emitted),
                saga.leg,
                handoff,
            )
        )

    def prefilled(self, saga: Saga, handoff: str, seconds: float) -> None:
        """The prompt of a choice is computed."""
        self._write(
            RequestPrefilled(
                self._request, saga.index, saga.worker, saga.epoch, handoff, round(seconds * 1000, 3)
            )
        )

    def setback(self, saga: Saga, before: SagaState, cause: str, reason: str, handoff: str) -> None:
        """A choice left a state backwards."""
        self._write(
            RequestStepped(
                self._request,
                saga.index,
                before,
                cause,
                saga.state,
                saga.worker,
                saga.epoch,
                reason[:REASON_CHARACTERS_MAX],
                handoff,
            )
        )

    def got(self, saga: Saga, tokens: int, text: str, since_accepted_s: float) -> None:
        """`tokens` new tokens of a choice came, and `text` was shown for them."""
        if self._kind != "off" and text:
            self._answers[saga.index].append(text)
        total = len(saga.emitted)
        if total == tokens:
            self._write(
                RequestStarted(
                    self._request,
                    saga.index,
                    saga.worker,
                    saga.epoch,
                    saga.cached_tokens,
                    round(since_accepted_s * 1000, 3),
                )
            )
        if total - self._marked[saga.index] >= CHECKPOINT_TOKENS:
            fresh = saga.emitted[self._marked[saga.index] :] if self._kind == "full" else []
            self._marked[saga.index] = total
            self._write(
                RequestCheckpoint(self._request, saga.index, total, pack_tokens(fresh) if fresh else b"")
            )

    def ended(
        self,
        reason: str,
        sagas: Sequence[Saga],
        cached_tokens: int,
        ttft_s: float,
        duration_s: float,
        error: str,
    ) -> None:
        """The one terminal event. A second call is a mistake of ours and raises."""
        if self._ended:
            raise RuntimeError(f"{self._request} ended twice")
        self._ended = True
        answers = tuple(self._payload("".join(parts).encode()) for parts in self._answers)
        self._write(
            RequestEnded(
                self._request,
                reason,
                sum(len(saga.emitted) for saga in sagas),
                cached_tokens,
                sum(saga.migrations for saga in sagas),
                round(ttft_s * 1000, 3),
                round(duration_s * 1000, 3),
                error,
                self._kind,
                answers if self._kind != "off" else (),
            )
        )

    def _payload(self, data: bytes) -> bytes:
        if self._kind == "off":
            return b""
        return sha256(data).digest() if self._kind == "hashed" else data

    def _write(self, event: RequestEvent) -> None:
        self._ledger.write(event, self._trace)
