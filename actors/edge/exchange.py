"""One generation request from prepared prompt to last byte: its choices, its sink, its terminal event."""

import asyncio
from typing import Any

import msgspec

from headwater.actors import metrics
from headwater.actors.edge import render
from headwater.actors.edge.answer import Answer
from headwater.actors.edge.errors import ApiError
from headwater.actors.edge.fleet import Fleet
from headwater.actors.edge.http import PING, PING_S, Disconnect, EventStream, Headers, Send, respond
from headwater.actors.edge.machine import Cause
from headwater.actors.edge.models import Model
from headwater.actors.edge.record import RequestRecord
from headwater.actors.edge.saga import Saga
from headwater.actors.edge.wishes import NO_WISHES, Wishes
from headwater.schemas.hashing import U32
from headwater.schemas.inference import Sampling, TokenLogprob
from headwater.schemas.request import SagaState

HEADERS_S = 2.0
"""How long the headers of a stream wait for its first token, so that an early error has a status of its own."""


class Choice:
    """A saga's answer on its way to the client."""

    __slots__ = ("answer", "chunks", "length", "logprobs", "parts", "tokens")

    def __init__(self, answer: Answer, chunks: render.ChunkWriter) -> None:
        self.answer = answer
        self.chunks = chunks
        self.parts: list[str] = []
        self.length = 0
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []


class Exchange:
    """See the module. Also the `Sink` of its sagas."""

    def __init__(
        self,
        fleet: Fleet,
        model: Model,
        endpoint: render.Endpoint,
        request: str,
        *,
        prompts: list[U32],
        choices: int,
        sampling: Sampling,
        stops: list[str],
        include_usage: bool,
        stream: bool,
        cache_salt: str,
        priority: int,
        record: RequestRecord,
        body: bytes,
        wishes: Wishes = NO_WISHES,
        guide_param: str = "",
    ) -> None:
        world = fleet.world
        self.request = request
        self._fleet = fleet
        self._model = model
        self._endpoint: render.Endpoint = endpoint
        self._created_s = world.clock.wall_ns() // 1_000_000_000
        self._began_s = world.clock.monotonic_s()
        self._include_usage = include_usage
        self._want_logprobs = sampling.logprobs is not None
        self._prompt_tokens = sum(len(prompt) for prompt in prompts)
        self._record = record
        self._stream: EventStream | None = None
        self._streaming = stream
        loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = loop.create_future()
        self._heard: asyncio.Future[None] = loop.create_future()
        self._placing: asyncio.Future[None] | None = None
        self._open = len(prompts) * choices
        self.sagas: list[Saga] = []
        self._choices: list[Choice] = []
        for index in range(self._open):
            seed = sampling.seed
            one = sampling
            if choices > 1 and seed is not None:
                # Equal seeds would give equal choices.
                one = _with_seed(sampling, seed, index % choices)
            self.sagas.append(
                Saga(
                    fleet,
                    self,
                    request=request,
                    index=index,
                    pool=model.card.pool,
                    block_size=model.card.block_size,
                    prompt=prompts[index // choices],
                    sampling=one,
                    cache_salt=cache_salt,
                    priority=priority,
                    lora_name=model.lora_name,
                    wishes=wishes,
                    guide_param=guide_param,
                )
            )
            chunks = render.ChunkWriter(
                endpoint, request, self._created_s, model.card.name, index, include_usage
            )
            self._choices.append(Choice(Answer(model.tokenizer.decoder(), stops), chunks))
        record.accepted(model.card.name, endpoint, self._prompt_tokens, sampling.max_tokens, stream, body)
        metrics.ACTIVE.inc()

    async def run(self, send: Send, client: Disconnect) -> None:
        """Place every choice, then stream or collect until all ended or the client is gone."""
        error: ApiError | None = None
        self._fleet.calls.add(self)
        try:
            if not await self._place(client):
                return
            if self._streaming:
                await self._run_stream(send, client)
            else:
                await self._run_whole(send, client)
        except ApiError as raised:
            error = raised
            raise
        finally:
            self._fleet.calls.discard(self)
            for saga in self.sagas:
                saga.finish("cancelled")
            self._record_end(error)

    async def _place(self, client: Disconnect) -> bool:
        """False if the client hung up meanwhile. The choices of one prompt go where its first went."""
        placing = self._placing = asyncio.ensure_future(self._place_all())
        try:
            gone = await client.or_done(placing)
        finally:
            if not placing.done():
                placing.cancel()
                await asyncio.gather(placing, return_exceptions=True)
        if gone:
            return False
        if placing.cancelled():
            raise next(saga.error for saga in self.sagas if saga.error)
        placing.result()
        return True

    def abort(self, error: ApiError) -> None:
        """See `headwater.actors.edge.fleet.Call`."""
        for saga in self.sagas:
            saga.fail(error)
        if self._placing is not None and not self._placing.done():
            self._placing.cancel()

    async def _place_all(self) -> None:
        placed: dict[int, str] = {}
        for saga in self.sagas:
            key = id(saga.prompt)
            await saga.place(pinned=placed.get(key, ""))
            placed[key] = saga.worker

    def headers(self) -> Headers:
        """What an operator wants to know at a glance."""
        headers: Headers = [(b"x-request-id", self.request.encode())]
        decision = self.sagas[0].decision
        if decision is not None:
            chosen = decision.chosen
            headers += [
                (b"x-headwater-worker", decision.worker.encode()),
                (b"x-headwater-log-position", b"%d" % decision.position),
                (b"x-headwater-cached-blocks", b"%d" % chosen.cached_blocks),
            ]
            if decision.waited_ms:
                headers.append((b"x-headwater-waited-ms", b"%d" % decision.waited_ms))
            if decision.leg:
                # A stream's headers go out when the prompt is taken: who decodes it is not known then.
                headers.append((b"x-headwater-leg", decision.leg.encode()))
        if self.sagas[0].prefilled_by:
            headers.append((b"x-headwater-prefill-worker", self.sagas[0].prefilled_by.encode()))
        return headers

    async def _run_stream(self, send: Send, client: Disconnect) -> None:
        # An engine rejects a request within milliseconds of taking it: as an HTTP status, while there is none yet.
        if await client.or_done(self._heard, HEADERS_S):
            return
        failed = next((saga.error for saga in self.sagas if saga.error), None)
        if failed is not None and not any(saga.emitted for saga in self.sagas):
            raise failed
        stream = EventStream(send)
        for choice in self._choices:
            role = choice.chunks.role()
            if role:
                stream.write(role)
        await stream.start(self.headers())
        self._stream = stream
        # Tokens that came while the request was being placed were kept.
        for saga, choice in zip(self.sagas, self._choices, strict=True):
            self._catch_up(stream, saga, choice)
        while not self._done.done():
            gone = await client.or_done(self._done, PING_S)
            if gone or stream.cut:
                return
            if not self._done.done():
                stream.write(PING)
        failed = next((saga.error for saga in self.sagas if saga.error), None)
        if failed is not None:
            stream.write(render.event(failed.document()), last=True)
        else:
            tail = render.DONE
            if self._include_usage:
                tail = (
                    render.usage_chunk(
                        self._endpoint, self.request, self._created_s, self._model.card.name, self._usage()
                    )
                    + tail
                )
            stream.write(tail, last=True)
        await stream.settle()

    def _catch_up(self, stream: EventStream, saga: Saga, choice: Choice) -> None:
        if choice.parts:
            stream.write(choice.chunks.text("".join(choice.parts), self._logprobs_of(choice, 0)))
        if saga.end in ("stop", "length"):
            stream.write(choice.chunks.finish(saga.end))

    async def _run_whole(self, send: Send, client: Disconnect) -> None:
        if not self._done.done() and await client.or_done(self._done):
            return
        failed = next((saga.error for saga in self.sagas if saga.error), None)
        if failed is not None:
            raise failed
        choices = [self._whole_choice(s, c) for s, c in zip(self.sagas, self._choices, strict=True)]
        body = render.whole(
            self._endpoint, self.request, self._created_s, self._model.card.name, choices, self._usage()
        )
        await respond(send, 200, body, self.headers())

    def _whole_choice(self, saga: Saga, choice: Choice) -> dict[str, Any]:
        text = "".join(choice.parts)
        document: dict[str, Any] = {"index": saga.index}
        if self._endpoint == "chat":
            document["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            document["text"] = text
        document["logprobs"] = self._logprobs_of(choice, 0)
        document["finish_reason"] = saga.end
        return document

    def on_placed(self, saga: Saga) -> None:
        """See `Sink.on_placed`."""
        self._record.routed(saga)

    def on_prefilled(self, saga: Saga, handoff: str, seconds: float) -> None:
        """See `Sink.on_prefilled`."""
        self._record.prefilled(saga, handoff, seconds)

    def on_setback(self, saga: Saga, before: SagaState, cause: Cause, reason: str, handoff: str) -> None:
        """See `Sink.on_setback`."""
        self._record.setback(saga, before, cause, reason, handoff)

    def on_tokens(self, saga: Saga, tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]) -> None:
        """See `Sink.on_tokens`."""
        if not self._heard.done():
            self._heard.set_result(None)
        choice = self._choices[saga.index]
        text = choice.answer.push(tokens)
        self._record.got(saga, len(tokens), text, self._fleet.world.clock.monotonic_s() - self._began_s)
        if self._want_logprobs:
            choice.tokens += tokens
            choice.logprobs += logprobs
        stream = self._stream
        if stream is None:
            choice.parts.append(text)
        elif self._want_logprobs:
            start = len(choice.tokens) - len(tokens)
            stream.write(choice.chunks.text(text, self._logprobs_of(choice, start)))
        elif text:
            stream.write(choice.chunks.text(text))
        choice.length += len(text)
        if choice.answer.stopped:
            saga.stop_early()

    def on_end(self, saga: Saga) -> None:
        """See `Sink.on_end`."""
        choice = self._choices[saga.index]
        if saga.end in ("stop", "length"):
            rest = choice.answer.flush() if not choice.answer.stopped else ""
            if rest:
                self._record.got(saga, 0, rest, 0.0)
            if self._stream is None:
                choice.parts.append(rest)
            else:
                if rest:
                    self._stream.write(choice.chunks.text(rest))
                self._stream.write(choice.chunks.finish(saga.end))
        self._open -= 1
        if (self._open == 0 or saga.error) and not self._done.done():
            self._done.set_result(None)
            if not self._heard.done():
                self._heard.set_result(None)

    def _logprobs_of(self, choice: Choice, start: int) -> dict[str, Any] | None:
        if not self._want_logprobs:
            return None
        tokens, logprobs = tuple(choice.tokens[start:]), tuple(choice.logprobs[start:])
        tokenizer = self._model.tokenizer
        if self._endpoint == "chat":
            return render.chat_logprobs(tokenizer, tokens, logprobs)
        return render.completion_logprobs(tokenizer, tokens, logprobs, choice.length if start else 0)

    def _usage(self) -> render.Usage:
        completion = sum(len(saga.emitted) for saga in self.sagas)
        return render.usage(self._prompt_tokens, completion, self._cached())

    def _cached(self) -> int:
        return sum(max(0, saga.cached_tokens) for saga in self.sagas)

    def _record_end(self, error: ApiError | None) -> None:
        """The one terminal event, and the metrics that go with it."""
        now = self._fleet.world.clock.monotonic_s()
        ends = {saga.end for saga in self.sagas}
        failure = error or next((saga.error for saga in self.sagas if saga.error), None)
        reason = next((e for e in ("error", "cancelled", "length", "stop") if e in ends), "error")
        if failure is not None:
            reason = "error"
        first = min((s.first_token_s for s in self.sagas if s.first_token_s), default=0.0)
        ttft_s = first - self._began_s if first else 0.0
        completion = sum(len(saga.emitted) for saga in self.sagas)
        migrations = sum(saga.migrations for saga in self.sagas)
        self._record.ended(
            reason, self.sagas, self._cached(), ttft_s, now - self._began_s, str(failure) if failure else ""
        )
        model = self._model.card.name
        metrics.ACTIVE.dec()
        metrics.REQUESTS.labels(model, self._endpoint, reason).inc()
        metrics.PROMPT_TOKENS.labels(model).inc(self._prompt_tokens)
        metrics.CACHED_TOKENS.labels(model).inc(self._cached())
        metrics.COMPLETION_TOKENS.labels(model).inc(completion)
        metrics.MIGRATIONS.labels(model).inc(migrations)
        metrics.REQUEST_SECONDS.labels(model).observe(now - self._began_s)
        if ttft_s:
            metrics.TTFT_SECONDS.labels(model).observe(ttft_s)


def _with_seed(sampling: Sampling, seed: int, number: int) -> Sampling:
    """The seed of one choice: the next ones, starting again at the least after the greatest."""
    seed = (seed + number + 2**63) % 2**64 - 2**63
    return msgspec.structs.replace(sampling, seed=seed)
