"""The life of one choice of one request: place it, stream it, move it when its worker dies, end it once.

    placing ──accepted──► streaming ──finish──► ended
       ▲                      │
       └──────── lost ────────┘     at most MIGRATIONS_MAX times

Frames are taken by position: what was received already is skipped, a hole is asked for. So the client gets each
token once, in order, whatever happens underneath. A move sends the prompt with all tokens so far to another
worker.
"""

from typing import TYPE_CHECKING, Literal, Protocol

import msgspec
import numpy as np
import structlog

from headwater.actors import metrics
from headwater.actors.bus_port import BusError
from headwater.actors.edge.errors import ApiError, bad_request, overloaded, upstream_failed
from headwater.schemas import hashing
from headwater.schemas.hashing import U32
from headwater.schemas.inference import Accepted, FrameEntry, GenerateRequest, Sampling, TokenLogprob
from headwater.schemas.route import Decision, RouteQuery, RouteRefused

if TYPE_CHECKING:
    from headwater.actors.edge.fleet import Fleet

MIGRATIONS_MAX = 5
PLACE_S_MAX = 10.0
"""How long a new request waits for a worker before the client is told to come back."""

MOVE_S_MAX = 60.0
"""How long a request under way waits for another worker."""

RETRY_S = 0.1

End = Literal["stop", "length", "cancelled", "error"]

_log = structlog.get_logger("headwater.saga")


class Sink(Protocol):
    """Whoever turns a choice's tokens into an HTTP response. Called on the event loop; must not wait."""

    def on_placed(self, saga: "Saga") -> None:
        """A worker took the choice, or the rest of it."""
        ...

    def on_tokens(self, saga: "Saga", tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]) -> None:
        """New tokens, in order, each once."""
        ...

    def on_end(self, saga: "Saga") -> None:
        """The choice ended; `saga.end` says how."""
        ...


class Saga:
    """One choice. `emitted` are all tokens so far, over all workers."""

    def __init__(
        self,
        fleet: "Fleet",
        sink: Sink,
        *,
        request: str,
        index: int,
        pool: str,
        block_size: int,
        prompt: U32,
        sampling: Sampling,
        cache_salt: str = "",
        priority: int = 0,
        lora_name: str = "",
    ) -> None:
        self.request = request
        self.index = index
        self.pool = pool
        self.prompt = prompt
        self.emitted: list[int] = []
        self.cached_tokens = -1
        self.migrations = 0
        self.decision: Decision | None = None
        self.end: End | None = None
        self.error: ApiError | None = None
        self.handle = 0
        self.worker = ""
        self.epoch = 0
        self.attempt = ""
        self.received = 0
        self.heard_s = 0.0
        self.first_token_s = 0.0
        self.asking = False
        self.unanswered = 0
        self.streaming = False
        self._fleet = fleet
        self._sink = sink
        self._block_size = block_size
        self._sampling = sampling
        self._cache_salt = cache_salt
        self._priority = priority
        self._lora_name = lora_name
        self._attempts = 0
        self._placed = False
        self._root = hashing.seed(lora_name, cache_salt)
        self._hashes = hashing.sequence_hashes(prompt, block_size, parent=self._root)

    async def place(self, *, pinned: str = "", wait_s: float = PLACE_S_MAX) -> None:
        """Find a worker that takes the request. Raises `ApiError` when none does in time."""
        clock = self._fleet.world.clock
        deadline = clock.monotonic_s() + wait_s
        exclude: list[str] = []
        reason = "no router answers"
        retry_after_s = 1.0
        while self.end is None:
            decision = None
            tokens = self._tokens()
            self._attempts += 1
            attempt = f"{self.request}-{self.index}-{self._attempts}"
            query = RouteQuery(
                attempt,
                len(tokens),
                self._sampling.max_tokens - len(self.emitted),
                hashing.pack_hashes(self._hashes),
                pinned,
                tuple(exclude),
                lora_name=self._lora_name,
            )
            try:
                reply = await self._fleet.route(self.pool, query)
                if isinstance(reply, RouteRefused):
                    reason, retry_after_s = reply.reason, reply.retry_after_s
                    exclude.clear()
                else:
                    decision = reply
            except BusError as error:
                reason = f"no router answers ({error})"
            if decision is not None:
                refusal = await self._send(decision, attempt, tokens)
                if refusal is None:
                    return
                reason = refusal
                exclude.append(f"{decision.worker}.{decision.epoch}")
                pinned = ""
            if clock.monotonic_s() >= deadline:
                raise overloaded(f"No worker could take the request: {reason}.", retry_after_s)
            if decision is None:
                await clock.sleep(RETRY_S)

    async def _send(self, decision: Decision, attempt: str, tokens: U32) -> str | None:
        """Hand the request to the chosen worker; returns why it did not take it."""
        fleet = self._fleet
        self.decision = decision
        self.worker, self.epoch, self.attempt = decision.worker, decision.epoch, attempt
        self.received, self.unanswered = 0, 0
        self._placed = False
        self.heard_s = fleet.world.clock.monotonic_s()
        self.handle = fleet.adopt(self)
        sampling = self._sampling
        if self.emitted:
            sampling = msgspec.structs.replace(
                sampling,
                max_tokens=sampling.max_tokens - len(self.emitted),
                min_tokens=max(0, sampling.min_tokens - len(self.emitted)),
            )
        request = GenerateRequest(
            request=attempt,
            edge=fleet.edge,
            handle=self.handle,
            tokens=hashing.pack_tokens(tokens),
            sampling=sampling,
            emitted=len(self.emitted),
            lora_name=self._lora_name,
            cache_salt=self._cache_salt,
            priority=self._priority,
        )
        # Frames may come before the answer to this does.
        self.streaming = True
        try:
            reply = await fleet.generate(self.worker, self.epoch, request)
        except BusError as error:
            if self._moved_on(attempt):
                return None
            self._leave()
            # It may have been taken after all: nobody wants it any more.
            fleet.cancel(decision.worker, decision.epoch, attempt)
            return str(error)
        if isinstance(reply, Accepted):
            if self.end == "cancelled":
                fleet.cancel(decision.worker, decision.epoch, attempt)
            elif not self._moved_on(attempt):
                self._note_placed()
            return None
        if self._moved_on(attempt):
            return None
        self._leave()
        if not reply.retryable:
            raise bad_request(reply.reason)
        return reply.reason

    def _note_placed(self) -> None:
        """The worker has the request: its answer says so, or a frame that overtook it."""
        if not self._placed:
            self._placed = True
            self._sink.on_placed(self)

    def _moved_on(self, attempt: str) -> bool:
        """Did the choice end, or move to another worker, while this attempt was being sent?"""
        return self.end is not None or not self.streaming or self.attempt != attempt

    def _tokens(self) -> U32:
        """Prompt and everything generated so far; the hashes of its full blocks are kept beside it."""
        if not self.emitted:
            return self.prompt
        tokens: U32 = np.concatenate([self.prompt, np.array(self.emitted, np.uint32)])
        self._hashes = hashing.sequence_hashes(tokens, self._block_size, parent=self._root)
        return tokens

    def on_entry(self, entry: FrameEntry, now_s: float) -> None:
        """Tokens from the worker, from a frame or a status answer."""
        if self.end is not None:
            return
        self.heard_s = now_s
        self._note_placed()
        skip = self.received - entry.position
        if skip < 0:
            metrics.FRAME_GAPS.inc()
            if not self.asking:
                self.asking = True
                self._fleet.spawn(self._fleet.ask(self), "status")
            return
        if self.cached_tokens < 0 <= entry.cached_tokens:
            self.cached_tokens = entry.cached_tokens
        tokens = entry.tokens[skip:] if skip else entry.tokens
        if tokens:
            if not self.first_token_s:
                self.first_token_s = now_s
            self.received += len(tokens)
            self.emitted.extend(tokens)
            self._sink.on_tokens(self, tokens, entry.logprobs[skip:])
        if entry.finish and self.end is None:
            if entry.finish == "stop":
                self.finish("stop")
            elif entry.finish == "length":
                self.finish("length")
            else:
                self.lost(f"worker {self.worker}: {entry.detail or 'it gave the request up'}")

    def lost(self, reason: str) -> None:
        """The worker is gone or gave the request up: move it."""
        if self.end is not None or not self.streaming:
            return
        before = f"{self.worker}.{self.epoch}"
        self._fleet.cancel(self.worker, self.epoch, self.attempt)
        self._leave()
        self.migrations += 1
        _log.warning(
            "request_moves",
            request=self.request,
            choice=self.index,
            reason=reason,
            emitted_tokens=len(self.emitted),
            migrations=self.migrations,
        )
        if self.migrations > MIGRATIONS_MAX:
            self.fail(upstream_failed(f"The request was moved {MIGRATIONS_MAX} times; last: {reason}."))
        elif len(self.emitted) >= self._sampling.max_tokens:
            self.finish("length")
        else:
            self._fleet.spawn(self._move(before), "move")

    async def _move(self, before: str) -> None:
        try:
            await self.place(wait_s=MOVE_S_MAX)
        except ApiError as error:
            self.fail(upstream_failed(f"Worker {before} failed and the request found no other: {error}"))

    def finish(self, end: End) -> None:
        """End the choice: its first end counts. A worker that still generates is told to stop."""
        if self.end is not None:
            return
        generating = self.streaming and end == "cancelled"
        if generating:
            self._fleet.cancel(self.worker, self.epoch, self.attempt)
        self._leave()
        self.end = end
        self._sink.on_end(self)

    def stop_early(self) -> None:
        """A stop string came: the answer is whole although the worker goes on."""
        if self.end is None:
            self._fleet.cancel(self.worker, self.epoch, self.attempt)
            self.finish("stop")

    def fail(self, error: ApiError) -> None:
        """End the choice with an error."""
        if self.end is None:
            self._leave()
            self.end, self.error = "error", error
            self._sink.on_end(self)

    def _leave(self) -> None:
        self.streaming = False
        self._fleet.forget(self.handle)
