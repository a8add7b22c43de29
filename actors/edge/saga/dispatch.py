"""The messages of a choice's saga: route queries, and the request itself to the worker that the router names."""

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from headwater.actors.bus import BusError, MessageTooLarge, NoResponder
from headwater.actors.edge.saga.picked import Picked
from headwater.actors.edge.saga.placement import Dispatcher
from headwater.actors.edge.saga.types import (
    AskRouter,
    Attempt,
    ChoiceSpec,
    Dispatch,
    LegAccepted,
    LegRefused,
    LegUnanswered,
    RouteAnswer,
    Routed,
    attempt_name,
)
from headwater.schemas import hashing
from headwater.schemas.events.request import RequestEncoded
from headwater.schemas.events.route import Decision
from headwater.schemas.hashing import U32
from headwater.schemas.messages.inference import Accepted, GenerateRequest, Sampling
from headwater.schemas.messages.media import PromptMedia


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
        self._media: list[hashing.MultimodalDigest] = []
        if media:
            places = [(item.id, item.start, item.tokens) for item in media]
            self._media = hashing.media_digests(places, block_size)
        self._prompt = prompt
        self.block_size = block_size
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
            self._tokens, self.block_size, parent=self._root, multimodal=self._media
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
        self._media = self._sent_media = media
        self._decision: Decision | None = None
        """The last one: the worker that the next leg goes to."""
        self._sequence = TokenSequence(prompt, block_size, spec.constraints.lora_name, spec.cache_salt, media)
        self._dispatcher = dispatcher
        self._workers = dispatcher.workers
        self._clock = dispatcher.clock

    def fits(self, picked: Picked) -> bool:
        """Was it decided for this choice, and for the same prompt? The hash of the last full block covers all before it, and the cache salt."""
        decision = picked.decision
        tokens, packed = self._sequence.extend([])
        hashes = hashing.unpack_hashes(packed)
        own = (
            self._dispatcher.pool,
            attempt_name(self._spec, picked.attempt),
            len(tokens),
            len(hashes),
            int(hashes[-1]) if len(hashes) else 0,
        )
        made_for = decision.request, decision.prompt_tokens, decision.blocks, decision.last
        return own == (picked.pool, *made_for)

    async def query_router(self, ask: AskRouter, emitted: list[int]) -> RouteAnswer:
        """Query the router for a worker that generates what follows `emitted`."""
        tokens, hashes = self._sequence.extend(emitted)
        max_tokens = self._spec.sampling.max_tokens - len(emitted)
        answer = await self._dispatcher.route(ask, len(tokens), max_tokens, hashes)
        if isinstance(answer, Routed):
            self._decision = answer.decision
        return answer

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
            media=self._sent_media,
            edge_epoch=self._workers.epoch,
            tenant=self._dispatcher.tenant,
            trace=self._dispatcher.trace,
        )
        try:
            reply = await self._workers.generate(attempt.worker, attempt.epoch, request)
        except MessageTooLarge as error:
            refused = attempt.number, str(error), False, effect.handoff is not None, ""
            return LegRefused(*refused, self._clock.monotonic_s())
        except BusError as error:
            delivered = not isinstance(error, NoResponder)
            return LegUnanswered(attempt.number, str(error), delivered, self._clock.monotonic_s())
        now_s = self._clock.monotonic_s()
        if isinstance(reply, Accepted):
            return LegAccepted(attempt.number, now_s)
        refused = attempt.number, reply.reason, reply.retryable, reply.spent, reply.param
        return LegRefused(*refused, now_s, reply.gone)

    async def encode_images(self, attempt: Attempt) -> list[RequestEncoded]:
        """Have encode workers encode the images of a leg that is going to be sent; returns the events to record."""
        self._sent_media = self._media
        decision = self._decision
        if not self._media or attempt.leg == "decode" or decision is None:
            return []
        # Imported for requests with media only: a prompt of text takes a short way through the edge.
        from headwater.actors.edge.saga.encoders import EncodeLeg, Encoders

        spec = self._spec
        encoders = Encoders(self._dispatcher, self._sequence.block_size)
        leg = EncodeLeg(spec.request, spec.index, attempt.name, decision)
        self._sent_media, events = await encoders.encode(leg, self._media, spec.constraints)
        return events


def _remaining_sampling(sampling: Sampling, emitted: int, *, decodes: bool) -> Sampling:
    """The sampling of what follows the tokens `emitted`. The prompt's log probabilities are computed once."""
    if decodes and sampling.prompt_logprobs is not None:
        sampling = replace(sampling, prompt_logprobs=None)
    if not emitted:
        return sampling
    return replace(
        sampling,
        max_tokens=sampling.max_tokens - emitted,
        min_tokens=max(0, sampling.min_tokens - emitted),
        prompt_logprobs=None,
    )
