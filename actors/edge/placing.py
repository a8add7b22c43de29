"""Placing a choice: ask a router, hand the request to the worker it names, and again until one takes it.

One `place` runs at a time for a choice, and only while no worker has it: in the states `routing` and `handoff` of its
saga. It ends once a worker took a leg.
"""

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from headwater.actors.bus_port import BusError, NoResponder
from headwater.actors.edge.errors import overloaded, refused_by_router, rejected, upstream_failed
from headwater.actors.edge.wishes import Wishes
from headwater.schemas import hashing
from headwater.schemas.hashing import U32
from headwater.schemas.inference import Accepted, GenerateRequest, Leg, Sampling
from headwater.schemas.route import Decision, RouteQuery, RouteRefused

if TYPE_CHECKING:
    from headwater.actors.edge.fleet import Fleet
    from headwater.actors.edge.saga import Saga

MIGRATIONS_MAX = 5
RETRY_S = 0.1


class Placing:
    """See the module. `root` seeds the prompt's block hashes."""

    def __init__(self, fleet: "Fleet", saga: "Saga", block_size: int, root: int, wishes: Wishes) -> None:
        self._fleet = fleet
        self._saga = saga
        self._block_size = block_size
        self._root = root
        self._wishes = wishes
        self._began_s = fleet.world.clock.monotonic_s()
        self._had_worker = False
        self._hashes = hashing.sequence_hashes(saga.prompt, block_size, parent=root)
        self._hashed = len(saga.prompt)

    async def place(self, *, pinned: str, wait_s: float) -> None:
        """See `Saga.place`."""
        saga, clock = self._saga, self._fleet.world.clock
        deadline = clock.monotonic_s() + wait_s
        exclude: list[str] = []
        reason, retry_after_s = "no router answers", 1.0
        while saga.end is None:
            if saga.handoff_is_over():
                saga.drop_handoff("timed out", f"nobody took the prefilled prompt in time: {reason}")
            if saga.migrations > MIGRATIONS_MAX:
                raise upstream_failed(f"The request was moved {MIGRATIONS_MAX} times; last: {reason}.")
            number, attempt = saga.next_attempt()
            tokens = self._tokens()
            decision = None
            asked_s = clock.monotonic_s()
            try:
                query = self._query(attempt, tokens, pinned, exclude)
                reply = await self._fleet.routing.route(saga.pool, query, lambda: saga.end is None)
                if isinstance(reply, RouteRefused):
                    if reply.for_good:
                        raise refused_by_router(reply)
                    reason, retry_after_s = reply.reason, reply.retry_after_s
                    exclude.clear()
                else:
                    decision = reply
                    self._had_worker = True
            except BusError as error:
                reason = f"no router answers ({error})"
            deadline += self._fleet.routing.waited_s(asked_s)
            if saga.end is not None:
                return
            if decision is not None:
                refusal = await self._send(decision, number, attempt, tokens)
                if saga.end is not None or saga.accepted >= number:
                    return
                reason = refusal
                exclude.append(f"{decision.worker}.{decision.epoch}")
                pinned = ""
            if clock.monotonic_s() >= deadline:
                raise overloaded(f"No worker could take the request: {reason}.", retry_after_s)
            if decision is None:
                await clock.sleep(RETRY_S)

    def _query(self, attempt: str, tokens: U32, pinned: str, exclude: list[str]) -> RouteQuery:
        saga = self._saga
        holder = saga.holder
        behind = saga.state == "handoff" and holder is not None
        query = RouteQuery(
            attempt,
            len(tokens),
            saga.sampling.max_tokens - len(saga.emitted),
            hashing.pack_hashes(self._hashes),
            "" if behind else pinned,
            tuple(exclude),
            "decode" if behind else "",
            saga.lora_name,
            saga.needs,
            holder.pairs_with if behind and holder is not None else "",
        )
        # What a router has let through once does not queue up again, and choices of one prompt are let through together.
        passed_s = self._fleet.world.clock.monotonic_s() - self._began_s
        return self._wishes.put_into(query, passed_s=passed_s, waits=not (self._had_worker or pinned))

    async def _send(self, decision: Decision, number: int, attempt: str, tokens: U32) -> str:
        """Hand the request to the chosen worker; returns why it did not take it."""
        fleet, saga = self._fleet, self._saga
        leg: Leg = decision.leg
        handoff = saga.holder.handoff if leg == "decode" and saga.holder is not None else None
        if leg == "decode" and handoff is None:
            # Nothing was worth handing over: the worker computes the prompt itself.
            leg = ""
        saga.begin_leg(decision, number, attempt, leg)
        request = GenerateRequest(
            request=attempt,
            edge=fleet.edge,
            handle=saga.handle,
            tokens=hashing.pack_tokens(tokens),
            sampling=_rest_of(saga.sampling, len(saga.emitted)),
            emitted=len(saga.emitted),
            lora_name=saga.lora_name,
            cache_salt=saga.cache_salt,
            priority=saga.priority,
            leg=leg,
            handoff=handoff,
        )
        try:
            reply = await fleet.generate(decision.worker, decision.epoch, request)
        except NoResponder as error:
            # It never got there: the prompt's KV is as it was, for another worker.
            if saga.accepted < number and not saga.moved_on(attempt):
                saga.turned_down("refused", str(error))
            return str(error)
        except BusError as error:
            if saga.accepted < number and not saga.moved_on(attempt):
                # It may have been taken after all: nobody wants it any more, and its KV may be fetched already.
                fleet.cancel(decision.worker, decision.epoch, attempt)
                saga.turned_down("spent" if handoff is not None else "refused", str(error))
            return str(error)
        if isinstance(reply, Accepted):
            if saga.accepted < number and saga.moved_on(attempt):
                fleet.cancel(decision.worker, decision.epoch, attempt)
            elif not saga.moved_on(attempt):
                saga.note_accepted()
            return f"worker {decision.worker} was lost"
        if saga.accepted < number and not saga.moved_on(attempt):
            spent = handoff is not None and reply.spent
            saga.turned_down("spent" if spent else "refused", reply.reason)
            if not reply.retryable:
                raise rejected(reply.reason, reply.param or saga.guide_param)
        return reply.reason

    def _tokens(self) -> U32:
        """Prompt and everything generated so far; the hashes of its full blocks are kept beside it."""
        saga = self._saga
        if not saga.emitted:
            return saga.prompt
        tokens: U32 = np.concatenate([saga.prompt, np.array(saga.emitted, np.uint32)])
        if len(tokens) != self._hashed:
            self._hashes = hashing.sequence_hashes(tokens, self._block_size, parent=self._root)
            self._hashed = len(tokens)
        return tokens


def _rest_of(sampling: Sampling, emitted: int) -> Sampling:
    """How to pick the tokens that are left."""
    if not emitted:
        return sampling
    return msgspec.structs.replace(
        sampling,
        max_tokens=sampling.max_tokens - emitted,
        min_tokens=max(0, sampling.min_tokens - emitted),
    )
