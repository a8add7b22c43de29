"""One generation request from prepared prompts to the last byte: its choices, its response, its terminal event."""

import asyncio
from typing import Any

import msgspec

from headwater.actors.edge.api import responses
from headwater.actors.edge.clients.workers import WorkerRegistry
from headwater.actors.edge.model.catalog import Model
from headwater.actors.edge.model.stop_strings import StopStringMatcher
from headwater.actors.edge.request.dispatch import ChoiceMessages, Dispatcher
from headwater.actors.edge.request.driver import ChoiceDriver
from headwater.actors.edge.request.record import RequestLogWriter
from headwater.actors.edge.request.routing_hints import NO_HINTS, RoutingHints
from headwater.actors.edge.request.saga_types import ChoiceSpec
from headwater.actors.http.asgi import PING, PING_S, Disconnect, EventStream, Headers, Send, respond
from headwater.actors.http.errors import ApiError
from headwater.schemas.constraints import Constraints
from headwater.schemas.hashing import U32
from headwater.schemas.messages.inference import Sampling, TokenLogprob
from headwater.schemas.tables.capability import required_capabilities

HEADERS_S = 2.0
"""Seconds that a stream's headers wait for its first token, so that an early error gets an HTTP status of its own."""


class CompletionChoice:
    """The text of one choice on its way to the client."""

    __slots__ = ("answer", "chunks", "first_token_s", "length", "logprobs", "parts", "tokens")

    def __init__(self, answer: StopStringMatcher, chunks: responses.ChunkWriter) -> None:
        self.answer = answer
        self.chunks = chunks
        self.parts: list[str] = []
        self.length = 0
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.first_token_s = 0.0


class CompletionCall:
    """See the module. It is the `ChoiceOutput` of its choices' drivers."""

    def __init__(
        self,
        workers: WorkerRegistry,
        model: Model,
        endpoint: responses.Endpoint,
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
        record: RequestLogWriter,
        body: bytes,
        hints: RoutingHints = NO_HINTS,
        guide_param: str = "",
    ) -> None:
        self.request = request
        self._workers = workers
        self._clock = workers.world.clock
        self._model = model
        self._endpoint: responses.Endpoint = endpoint
        self._created_s = self._clock.wall_ns() // 1_000_000_000
        self._include_usage = include_usage
        self._want_logprobs = sampling.logprobs is not None
        self._prompt_tokens = sum(len(prompt) for prompt in prompts)
        self._record = record
        self._stream: EventStream | None = None
        self._streaming = stream
        loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = loop.create_future()
        self._started: asyncio.Future[None] = loop.create_future()
        self._dispatching: asyncio.Future[None] | None = None
        self._open = len(prompts) * choices
        self._per_prompt = choices
        self.drivers: list[ChoiceDriver] = []
        self._choices: list[CompletionChoice] = []
        card = model.card
        dispatcher = Dispatcher(workers, card.pool, hints)
        constraints = Constraints(lora_name=model.lora_name, needs=required_capabilities(sampling))
        for prompt in prompts:
            for number in range(choices):
                index = len(self.drivers)
                # Equal seeds would give equal choices.
                one = _with_seed(sampling, number) if choices > 1 else sampling
                spec = ChoiceSpec(request, index, one, constraints, guide_param, cache_salt, priority)
                messages = ChoiceMessages(spec, prompt, card.block_size, dispatcher)
                self.drivers.append(ChoiceDriver(spec, messages, workers, record, self))
                chunks = responses.ChunkWriter(
                    endpoint, request, self._created_s, card.name, index, include_usage
                )
                self._choices.append(
                    CompletionChoice(StopStringMatcher(model.tokenizer.decoder(), stops), chunks)
                )
        record.accepted(self._prompt_tokens, self._open, body, max_tokens=sampling.max_tokens, stream=stream)

    async def run(self, send: Send, client: Disconnect) -> None:
        """Place every choice, then stream or collect until all ended or the client disconnected."""
        error: ApiError | None = None
        self._workers.calls.add(self)
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
            self._workers.calls.discard(self)
            for driver in self.drivers:
                driver.cancel()
            self._record_end(error)

    async def _place(self, client: Disconnect) -> bool:
        """False if the client disconnected before every choice was placed."""
        dispatching = self._dispatching = asyncio.ensure_future(self._place_all())
        try:
            disconnected = await client.or_done(dispatching)
        finally:
            if not dispatching.done():
                dispatching.cancel()
                await asyncio.gather(dispatching, return_exceptions=True)
        if disconnected:
            return False
        if dispatching.cancelled():
            raise next(driver.error for driver in self.drivers if driver.error)
        dispatching.result()
        return True

    def abort(self, error: ApiError) -> None:
        """See `headwater.actors.edge.clients.workers.ClientCall`."""
        for driver in self.drivers:
            driver.abort(error)
        if self._dispatching is not None and not self._dispatching.done():
            self._dispatching.cancel()

    async def _place_all(self) -> None:
        """The choices of one prompt go to the worker of its first choice, which has the prompt cached."""
        pinned = ""
        for index, driver in enumerate(self.drivers):
            await driver.place(pinned if index % self._per_prompt else "")
            pinned = driver.saga.attempt.worker

    def headers(self) -> Headers:
        """Response headers that show how the first choice was routed."""
        headers: Headers = [(b"x-request-id", self.request.encode())]
        saga = self.drivers[0].saga
        decision = saga.decision
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
                # A stream's headers are sent when the prompt is placed, before its decode worker is chosen.
                headers.append((b"x-headwater-leg", decision.leg.encode()))
        if saga.prefilled_by:
            headers.append((b"x-headwater-prefill-worker", saga.prefilled_by.encode()))
        return headers

    async def _run_stream(self, send: Send, client: Disconnect) -> None:
        # An engine rejects a request within milliseconds of accepting it; while no headers are sent, as an HTTP status.
        if await client.or_done(self._started, HEADERS_S):
            return
        failed = self._failure()
        if failed is not None and not any(driver.emitted for driver in self.drivers):
            raise failed
        stream = EventStream(send)
        for choice in self._choices:
            role = choice.chunks.role()
            if role:
                stream.write(role)
        await stream.start(self.headers())
        self._stream = stream
        # Tokens that arrived before the headers were sent were kept.
        for driver, choice in zip(self.drivers, self._choices, strict=True):
            self._catch_up(stream, driver, choice)
        while not self._done.done():
            disconnected = await client.or_done(self._done, PING_S)
            if disconnected or stream.cut:
                return
            if not self._done.done():
                stream.write(PING)
        failed = self._failure()
        if failed is not None:
            stream.write(responses.event(failed.document()), last=True)
        else:
            tail = responses.DONE
            if self._include_usage:
                tail = (
                    responses.usage_chunk(
                        self._endpoint, self.request, self._created_s, self._model.card.name, self._usage()
                    )
                    + tail
                )
            stream.write(tail, last=True)
        await stream.settle()

    def _catch_up(self, stream: EventStream, driver: ChoiceDriver, choice: CompletionChoice) -> None:
        if choice.parts:
            stream.write(choice.chunks.text("".join(choice.parts), self._logprobs_of(choice, 0)))
        end = driver.saga.end
        if end in ("stop", "length"):
            stream.write(choice.chunks.finish(end))

    async def _run_whole(self, send: Send, client: Disconnect) -> None:
        if not self._done.done() and await client.or_done(self._done):
            return
        failed = self._failure()
        if failed is not None:
            raise failed
        choices = [self._whole_choice(d, c) for d, c in zip(self.drivers, self._choices, strict=True)]
        body = responses.whole(
            self._endpoint, self.request, self._created_s, self._model.card.name, choices, self._usage()
        )
        await respond(send, 200, body, self.headers())

    def _whole_choice(self, driver: ChoiceDriver, choice: CompletionChoice) -> dict[str, Any]:
        text = "".join(choice.parts)
        document: dict[str, Any] = {"index": driver.saga.spec.index}
        if self._endpoint == "chat":
            document["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            document["text"] = text
        document["logprobs"] = self._logprobs_of(choice, 0)
        document["finish_reason"] = driver.saga.end
        return document

    def write_tokens(self, index: int, tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]) -> None:
        """See `ChoiceOutput.write_tokens`."""
        choice, driver = self._choices[index], self.drivers[index]
        if len(driver.emitted) == len(tokens):
            self._write_start(choice, driver)
        text = choice.answer.push(tokens)
        self._record.generated(index, driver.emitted, text)
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
            driver.stop()

    def _write_start(self, choice: CompletionChoice, driver: ChoiceDriver) -> None:
        choice.first_token_s = self._clock.monotonic_s()
        attempt = driver.saga.attempt
        self._record.started(driver.saga.spec.index, attempt.worker, attempt.epoch, driver.saga.cached_tokens)
        if not self._started.done():
            self._started.set_result(None)

    def write_end(self, index: int) -> None:
        """See `ChoiceOutput.write_end`."""
        choice, driver = self._choices[index], self.drivers[index]
        end = driver.saga.end
        if end in ("stop", "length"):
            rest = choice.answer.flush() if not choice.answer.stopped else ""
            if rest:
                self._record.generated(index, driver.emitted, rest)
            if self._stream is None:
                choice.parts.append(rest)
            else:
                if rest:
                    self._stream.write(choice.chunks.text(rest))
                self._stream.write(choice.chunks.finish(end))
        self._open -= 1
        if (self._open == 0 or driver.error) and not self._done.done():
            self._done.set_result(None)
            if not self._started.done():
                self._started.set_result(None)

    def _failure(self) -> ApiError | None:
        return next((driver.error for driver in self.drivers if driver.error), None)

    def _logprobs_of(self, choice: CompletionChoice, start: int) -> dict[str, Any] | None:
        if not self._want_logprobs:
            return None
        tokens, logprobs = tuple(choice.tokens[start:]), tuple(choice.logprobs[start:])
        tokenizer = self._model.tokenizer
        if self._endpoint == "chat":
            return responses.chat_logprobs(tokenizer, tokens, logprobs)
        return responses.completion_logprobs(tokenizer, tokens, logprobs, choice.length if start else 0)

    def _usage(self) -> responses.Usage:
        return responses.usage(self._prompt_tokens, self._completion_tokens(), self._cached_tokens())

    def _completion_tokens(self) -> int:
        return sum(len(driver.emitted) for driver in self.drivers)

    def _cached_tokens(self) -> int:
        return sum(max(0, driver.saga.cached_tokens) for driver in self.drivers)

    def _record_end(self, error: ApiError | None) -> None:
        """Write the one terminal event."""
        failure = error or self._failure()
        ends = {driver.saga.end for driver in self.drivers}
        reason = next((e for e in ("error", "cancelled", "length", "stop") if e in ends), "error")
        first_s = min((c.first_token_s for c in self._choices if c.first_token_s), default=0.0)
        self._record.ended(
            "error" if failure is not None else reason,
            str(failure) if failure else "",
            completion_tokens=self._completion_tokens(),
            cached_tokens=self._cached_tokens(),
            migrations=sum(driver.saga.migrations for driver in self.drivers),
            ttft_s=first_s - self._record.began_s if first_s else 0.0,
        )


def _with_seed(sampling: Sampling, number: int) -> Sampling:
    """The sampling of one choice: seeds count up from the client's, and wrap around after the greatest."""
    if sampling.seed is None:
        return sampling
    seed = (sampling.seed + number + 2**63) % 2**64 - 2**63
    return msgspec.structs.replace(sampling, seed=seed)
