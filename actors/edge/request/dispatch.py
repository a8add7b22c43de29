"""Messages that place a request: route queries to the router, and the request itself to the worker that it names."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from headwater.actors.bus.port import BusError, NoResponder
from headwater.actors.edge.clients.workers import WorkerRegistry
from headwater.actors.edge.request.routing_hints import RoutingHints
from headwater.actors.edge.request.saga_types import (
    AskRouter,
    ChoiceSpec,
    Dispatch,
    LegAccepted,
    LegRefused,
    LegUnanswered,
    Routed,
    RouterRefused,
    RouterUnanswered,
)
from headwater.schemas import hashing
from headwater.schemas.events.route import Decision, RouteQuery, RouteRefused
from headwater.schemas.hashing import U32
from headwater.schemas.messages.inference import Accepted, GenerateRequest, Sampling
from headwater.schemas.messages.media import PromptMedia


class RouteAnswer(NamedTuple):
    """The router's reply, None with a `failure` where no router replied, and the seconds spent in its queue."""

    reply: Decision | RouteRefused | None
    failure: str
    waited_s: float


class Dispatcher:
    """Queries the router for one request: for its choices, or for its messages of prompts to pool."""

    def __init__(self, workers: WorkerRegistry, pool: str, hints: RoutingHints) -> None:
        self.workers = workers
        self.clock = workers.ports.clock
        self._pool = pool
        self._hints = hints
        self._opened_s = self.clock.monotonic_s()

    async def route(
        self, ask: AskRouter, prompt_tokens: int, max_tokens: int, hashes: bytes = b""
    ) -> RouteAnswer:
        """Query the router. `hashes` are the packed sequence hashes of the prompt's full blocks. May be cancelled."""
        began_s = self.clock.monotonic_s()
        query = RouteQuery(ask.attempt, prompt_tokens, max_tokens, hashes, ask.constraints)
        query = self._hints.apply_to(query, passed_s=began_s - self._opened_s, waits=ask.may_wait)
        reply: Decision | RouteRefused | None = None
        failure = ""
        try:
            reply = await self.workers.routing.route(self._pool, query)
        except BusError as error:
            failure = str(error)
        return RouteAnswer(reply, failure, self.workers.routing.waited_s(began_s))


class TokenSequence:
    """A prompt and what was generated for it, with the hashes of its full blocks, computed once per length."""

    def __init__(
        self,
        prompt: U32,
        block_size: int,
        lora_name: str,
        cache_salt: str,
        media: Sequence[PromptMedia] = (),
    ) -> None:
        self._media = hashing.media_digests(
            [(item.id, item.start, item.tokens) for item in media], block_size
        )
        self._prompt = prompt
        self._block_size = block_size
        self._root = hashing.seed(lora_name, cache_salt)
        self._tokens = prompt
        self._hashes = self._hash()

    def extend(self, emitted: list[int]) -> tuple[U32, bytes]:
        """Tokens of the prompt followed by all `emitted`, and the packed hashes of their full blocks."""
        if len(self._tokens) != len(self._prompt) + len(emitted):
            self._tokens = np.concatenate([self._prompt, np.array(emitted, np.uint32)])
            self._hashes = self._hash()
        return self._tokens, self._hashes

    def _hash(self) -> bytes:
        hashes = hashing.sequence_hashes(
            self._tokens, self._block_size, parent=self._root, multimodal=self._media
        )
        return hashing.pack_hashes(hashes)


class ChoiceMessages:
    """The messages of one choice's saga: carries out `AskRouter` and `Dispatch`, and returns the event of the answer."""

    def __init__(
        self,
        spec: ChoiceSpec,
        prompt: U32,
        block_size: int,
        dispatcher: Dispatcher,
        media: tuple[PromptMedia, ...] = (),
    ) -> None:
        self._spec = spec
        self._media = media
        self._sequence = TokenSequence(prompt, block_size, spec.constraints.lora_name, spec.cache_salt, media)
        self._dispatcher = dispatcher
        self._workers = dispatcher.workers
        self._clock = dispatcher.clock

    async def query_router(
        self, ask: AskRouter, emitted: list[int]
    ) -> Routed | RouterRefused | RouterUnanswered:
        """Query the router for a worker that generates what follows `emitted`."""
        tokens, hashes = self._sequence.extend(emitted)
        max_tokens = self._spec.sampling.max_tokens - len(emitted)
        reply, failure, waited_s = await self._dispatcher.route(ask, len(tokens), max_tokens, hashes)
        now_s = self._clock.monotonic_s()
        if reply is None:
            return RouterUnanswered(ask.number, failure, waited_s, now_s)
        if isinstance(reply, Decision):
            return Routed(ask.number, reply, waited_s, now_s)
        return RouterRefused(ask.number, reply, waited_s, now_s)

    async def send_leg(
        self, effect: Dispatch, handle: int, emitted: list[int]
    ) -> LegAccepted | LegRefused | LegUnanswered:
        """Send a worker its leg, whose frames will carry `handle`."""
        attempt, spec = effect.attempt, self._spec
        tokens, _ = self._sequence.extend(emitted)
        request = GenerateRequest(
            request=attempt.name,
            edge=self._workers.edge,
            handle=handle,
            tokens=hashing.pack_tokens(tokens),
            sampling=_remaining_sampling(spec.sampling, len(emitted), decodes=attempt.leg == "decode"),
            emitted=len(emitted),
            lora_name=spec.constraints.lora_name,
            cache_salt=spec.cache_salt,
            priority=spec.priority,
            leg=attempt.leg,
            handoff=effect.handoff,
            media=self._media,
        )
        try:
            reply = await self._workers.generate(attempt.worker, attempt.epoch, request)
        except BusError as error:
            delivered = not isinstance(error, NoResponder)
            return LegUnanswered(attempt.number, str(error), delivered, self._clock.monotonic_s())
        now_s = self._clock.monotonic_s()
        if isinstance(reply, Accepted):
            return LegAccepted(attempt.number, now_s)
        return LegRefused(attempt.number, reply.reason, reply.retryable, reply.spent, reply.param, now_s)


def _remaining_sampling(sampling: Sampling, emitted: int, *, decodes: bool) -> Sampling:
    """The sampling of what follows the tokens `emitted`. The prompt's log probabilities are computed once."""
    if decodes and sampling.prompt_logprobs is not None:
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
    if not emitted:
        return sampling
    return msgspec.structs.replace(
        sampling,
        max_tokens=sampling.max_tokens - emitted,
        min_tokens=max(0, sampling.min_tokens - emitted),
        prompt_logprobs=None,
    )
