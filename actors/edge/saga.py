"""The life of one choice of one request: place it, stream it, move it when its worker dies, end it once.

Its states and what leads from one to another are in `headwater.actors.edge.machine`; here is what is done in each.
Frames are taken by position: what was received already is skipped, a hole is asked for. So the client gets each
token once, in order, whatever happens underneath. A move sends the prompt with all tokens so far to another
worker. Where the router splits a request, the prompt goes to one worker first; its KV is then claimed, once, by the
worker that decodes. Whenever that fails the prompt is computed again.
"""

from typing import TYPE_CHECKING, Literal

import structlog

from headwater.actors import metrics
from headwater.actors.edge.errors import ApiError, rejected, upstream_failed
from headwater.actors.edge.machine import SETBACKS, Cause, after
from headwater.actors.edge.moving import can_move, needs_of, why_not
from headwater.actors.edge.placing import MIGRATIONS_MAX, Placing
from headwater.actors.edge.sink import Holder, Sink
from headwater.actors.edge.wishes import NO_WISHES, Wishes
from headwater.schemas import hashing
from headwater.schemas.handoff import Handoff
from headwater.schemas.hashing import U32
from headwater.schemas.inference import FrameEntry, Leg, Sampling
from headwater.schemas.request import SagaState
from headwater.schemas.route import Decision

if TYPE_CHECKING:
    from headwater.actors.edge.fleet import Fleet

PLACE_S_MAX = 10.0
"""How long a new request waits for a worker before the client is told to come back."""

MOVE_S_MAX = 60.0
"""How long a request under way waits for another worker."""

PREFILL_S_MAX = 300.0
"""How long a prefill leg may take, its queue included, before the prompt is given to another worker."""

End = Literal["stop", "length", "cancelled", "error"]

_log = structlog.get_logger("headwater.saga")


class Saga:
    """One choice. `emitted` are all tokens so far, over all workers.

    `worker`, `epoch` and `attempt` are of the leg that runs, or ran last; `streaming` says that one runs.
    """

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
        wishes: Wishes = NO_WISHES,
        guide_param: str = "",
    ) -> None:
        self.request = request
        self.index = index
        self.pool = pool
        self.prompt = prompt
        self.sampling = sampling
        self.cache_salt = cache_salt
        self.lora_name = lora_name
        self.priority = priority
        self.needs = needs_of(sampling)
        # Engines do not know by which field the client asked for a guide.
        self.guide_param = guide_param
        self.emitted: list[int] = []
        self.cached_tokens = -1
        self.migrations = 0
        self.state: SagaState = "routing"
        self.decision: Decision | None = None
        self.end: End | None = None
        self.error: ApiError | None = None
        self.handle = 0
        self.leg: Leg = ""
        self.worker = ""
        self.epoch = 0
        self.attempt = ""
        self.received = 0
        self.heard_s = 0.0
        self.began_s = 0.0
        self.first_token_s = 0.0
        self.asking = False
        self.unanswered = 0
        self.streaming = False
        self.accepted = 0
        self.prefilled_by = ""
        self.holder: Holder | None = None
        self._fleet = fleet
        self._sink = sink
        self._number = 0
        self._attempts = 0
        self._placing = Placing(fleet, self, block_size, hashing.seed(lora_name, cache_salt), wishes)

    async def place(self, *, pinned: str = "", wait_s: float = PLACE_S_MAX) -> None:
        """Find a worker that takes the request, or its prompt. Raises `ApiError` when none does in time."""
        await self._placing.place(pinned=pinned, wait_s=wait_s)

    def next_attempt(self) -> tuple[int, str]:
        """Number and name of the next try to place the choice: no two are ever the same."""
        self._attempts += 1
        return self._attempts, f"{self.request}-{self.index}-{self._attempts}"

    def begin_leg(self, decision: Decision, number: int, attempt: str, leg: Leg) -> None:
        """A worker is about to be given a leg: its frames may come before its answer does."""
        self.decision = decision
        self.worker, self.epoch, self.attempt, self.leg = decision.worker, decision.epoch, attempt, leg
        self.received, self.unanswered = 0, 0
        self._number = number
        self.began_s = self.heard_s = self._fleet.world.clock.monotonic_s()
        self.handle = self._fleet.adopt(self)
        self.streaming = True

    def note_accepted(self) -> None:
        """The worker has the leg: its answer says so, or a frame that overtook it."""
        if self.accepted < self._number:
            self.accepted = self._number
            self._go("prefill accepted" if self.leg == "prefill" else "accepted")
            self._sink.on_placed(self)

    def moved_on(self, attempt: str) -> bool:
        """Did the choice end, or leave this attempt behind, while it was being sent?"""
        return self.end is not None or not self.streaming or self.attempt != attempt

    def turned_down(self, cause: Cause, reason: str) -> None:
        """The worker asked did not take its leg. `spent`: its hand-off can not be used by another one either."""
        self.leave()
        if cause == "spent":
            self.drop_handoff(cause, reason)
        else:
            self._go(cause, reason)

    def handoff_is_over(self) -> bool:
        """Is the KV that waits for a second worker too old to be claimed?"""
        if self.state != "handoff" or self.holder is None or self.holder.handoff is None:
            return False
        return self._fleet.world.clock.monotonic_s() >= self.holder.until_s

    def drop_handoff(self, cause: Cause, reason: str) -> None:
        """Give up the prompt's KV: it must be computed again."""
        self.migrations += 1
        self._go(cause, reason, self._release())

    def _go(self, cause: Cause, reason: str = "", handoff: str = "") -> None:
        before = self.state
        self.state = after(before, cause)
        if cause in SETBACKS:
            self._sink.on_setback(self, before, cause, reason, handoff)

    def on_entry(self, entry: FrameEntry, now_s: float) -> None:
        """News from the worker, from a frame or a status answer."""
        if self.end is not None:
            return
        self.heard_s = now_s
        self.note_accepted()
        skip = self.received - entry.position
        if skip < 0:
            metrics.FRAME_GAPS.inc()
            if not self.asking:
                self.asking = True
                self._fleet.spawn(self._fleet.ask(self), "status")
            return
        if self.cached_tokens < 0 <= entry.cached_tokens:
            self.cached_tokens = entry.cached_tokens
        if entry.handoff is not None or entry.finish == "handoff":
            self._on_prefilled(entry.handoff, now_s)
            return
        tokens = entry.tokens[skip:] if skip else entry.tokens
        if tokens:
            if not self.first_token_s:
                self.first_token_s = now_s
            # The KV was fetched, so who held it may forget it.
            self._release()
            self.received += len(tokens)
            self.emitted.extend(tokens)
            self._sink.on_tokens(self, tokens, entry.logprobs[skip:])
        if entry.finish and self.end is None:
            if entry.finish == "stop":
                self.finish("stop")
            elif entry.finish == "length":
                self.finish("length")
            elif entry.finish == "rejected":
                self.leave()
                self.fail(rejected(entry.detail, entry.param or self.guide_param))
            else:
                self.lost(f"worker {self.worker}: {entry.detail or 'it gave the request up'}")

    def _on_prefilled(self, handoff: Handoff | None, now_s: float) -> None:
        if self.state != "prefill":
            return
        self.holder = Holder(self, handoff, now_s)
        self.prefilled_by = self.worker
        self.leave()
        self._go("prefilled")
        self._sink.on_prefilled(self, handoff.id if handoff is not None else "", now_s - self.began_s)
        self._fleet.spawn(self._go_on(f"{self.worker}.{self.epoch}"), "hand-off")

    def overdue(self, now_s: float) -> bool:
        """Has the prefill leg been under way for longer than one may be?"""
        return self.state == "prefill" and now_s - self.began_s > PREFILL_S_MAX

    def lost(self, reason: str, cause: Cause = "lost") -> None:
        """The worker is gone, gave the request up or took too long: move it."""
        if self.end is not None or not self.streaming:
            return
        self._fleet.cancel(self.worker, self.epoch, self.attempt)
        self.leave()
        _log.warning(
            "request_moves",
            request=self.request,
            choice=self.index,
            state=self.state,
            reason=reason,
            emitted_tokens=len(self.emitted),
            migrations=self.migrations + 1,
        )
        if self.accepted < self._number:
            # Whoever places it sees that this attempt is over, and goes on.
            self.turned_down("spent" if self.leg == "decode" else "refused", reason)
            return
        self.migrations += 1
        self._go(cause, reason, self._release())
        self._go_on_or_fail(reason)

    def _go_on_or_fail(self, reason: str) -> None:
        if self.migrations > MIGRATIONS_MAX:
            self.fail(upstream_failed(f"The request was moved {MIGRATIONS_MAX} times; last: {reason}."))
        elif len(self.emitted) >= self.sampling.max_tokens:
            self.finish("length")
        elif not can_move(self.sampling, len(self.emitted)):
            self.fail(upstream_failed(f"{reason}; {why_not(self.sampling, len(self.emitted))}."))
        else:
            self._fleet.spawn(self._go_on(f"{self.worker}.{self.epoch}"), "move")

    async def _go_on(self, before: str) -> None:
        try:
            await self.place(wait_s=MOVE_S_MAX)
        except ApiError as error:
            self.fail(upstream_failed(f"Worker {before} failed and the request found no other: {error}"))

    def finish(self, end: Literal["stop", "length", "cancelled"]) -> None:
        """End the choice: its first end counts. A worker that still generates is told to stop."""
        if self.end is not None:
            return
        if self.streaming and end == "cancelled":
            self._fleet.cancel(self.worker, self.epoch, self.attempt)
        self._end(end, "cancelled" if end == "cancelled" else "finished")

    def stop_early(self) -> None:
        """A stop string came: the answer is whole although the worker goes on."""
        if self.end is None:
            self._fleet.cancel(self.worker, self.epoch, self.attempt)
            self.finish("stop")

    def fail(self, error: ApiError) -> None:
        """End the choice with an error."""
        if self.end is None:
            if self.streaming:
                self._fleet.cancel(self.worker, self.epoch, self.attempt)
            self.error = error
            self._end("error", "failed")

    def _end(self, end: End, cause: Cause) -> None:
        self.leave()
        self._release()
        self._go(cause)
        self.end = end
        self._sink.on_end(self)

    def leave(self) -> None:
        """Listen no more to the worker."""
        self.streaming = False
        self._fleet.forget(self.handle)

    def _release(self) -> str:
        """Tell who holds the prompt's KV that it is fetched, or not wanted; returns the hand-off's name."""
        holder, self.holder = self.holder, None
        if holder is None or holder.handoff is None:
            return ""
        self._fleet.cancel(holder.worker, holder.epoch, holder.attempt)
        return holder.handoff.id
