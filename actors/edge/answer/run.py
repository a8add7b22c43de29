"""One generation request from prepared prompts to the last byte: its choices, its response, its terminal event."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Final

import structlog
from msgspec.structs import replace

from headwater.actors.edge.admit.limiter import TimeLimit
from headwater.actors.edge.answer.choice import (
    ByteSink,
    CallIds,
    ChoiceWriter,
    HttpSink,
    ParsedChoiceWriter,
    ResponseEncoder,
    StopStringMatcher,
    routing_headers,
)
from headwater.actors.edge.prompt.prepare import LanguageChoice, Prepared, prepare, with_seed
from headwater.actors.edge.prompt.request import (
    ChoiceEnd,
    GenerationRequest,
    GenerationResult,
    GenerationStart,
    PromptDetail,
    TokenUsage,
    written_tokens,
)
from headwater.actors.edge.saga.driver import ChoiceDriver, ChoiceMessages
from headwater.actors.edge.saga.http_call import (
    NO_HINTS,
    Call,
    Picked,
    RoutingHints,
    Serving,
    parse_routing_headers,
)
from headwater.actors.edge.saga.placement import Dispatcher
from headwater.actors.edge.saga.record import RequestLogWriter
from headwater.actors.edge.saga.types import ChoiceSpec
from headwater.actors.edge.saga.workers import WorkerRegistry
from headwater.actors.http.asgi import PING_S, Disconnect, Headers
from headwater.actors.http.errors import ApiError, bad_request
from headwater.schemas.hashing import U32
from headwater.schemas.inference import TokenLogprob
from headwater.schemas.media import media_features
from headwater.schemas.routing import Constraints
from headwater.schemas.tables import required_capabilities

OMITTED_TOOLS: Final = b"x-headwater-omitted-tools"
"""The response's header with the types of tools that are not in the prompt."""

OMITTED_MAX: Final = 16

ENDS_THAT_COUNT: Final = ("error", "cancelled", "length", "stop")
"""The order of precedence: the end of a request with several choices is the first of these that one of its choices has."""

HEADERS_S: Final = 2.0
"""Seconds that a stream's headers wait for its first token, so that an early error gets an HTTP status of its own."""


BeforeEnd = Callable[[GenerationResult], Awaitable[None]]
"""What an API does with a whole answer before its client learns that it is whole."""


def first_choice(prepared: Prepared, name: str) -> ChoiceSpec:
    """The first choice of the request with this name; the others differ in their index and seed."""
    request, model, sampling = prepared.request, prepared.model, prepared.sampling
    card, media = model.card, prepared.media_of(0)
    features = media_features(media) if media else {}
    return ChoiceSpec(
        name,
        0,
        sampling,
        Constraints(
            lora_name=model.lora_name,
            needs=required_capabilities(sampling, **features),
            media_processor=card.media_processor if media else "",
        ),
        request.guide_param,
        prepared.salt.value,
        # A hint: engines without priorities ignore it.
        (request.hints.priority or 0) if "priority" in card.capabilities else 0,
        card.tokenizer,
        card.migrations_max,
    )


class Generation:
    """One generation request. It is the `ChoiceOutput` of its choices' drivers."""

    def __init__(
        self,
        workers: WorkerRegistry,
        prepared: Prepared,
        encoder: ResponseEncoder,
        sink: ByteSink,
        record: RequestLogWriter,
        id_: str,
        *,
        hints: RoutingHints = NO_HINTS,
        before_end: BeforeEnd | None = None,
        picked: Picked | None = None,
    ) -> None:
        self._before_end = before_end
        self._picked = picked
        request = prepared.request
        self.name = request.id_prefix + id_
        self._id = id_
        self._workers = workers
        self._clock = workers.ports.clock
        self._prepared = prepared
        self._prompt_tokens = prepared.prompt_tokens
        self._per_prompt = prepared.per_prompt
        self._encoder = encoder
        self._sink = sink
        self._record = record
        self._streams = request.stream
        self._wants_progress = request.stream and encoder.wants_progress
        self._has_stops = bool(request.stops)
        self._is_silent = request.max_tokens == 0
        self._created_s = self._clock.wall_ns() // 1_000_000_000
        self._begun = False
        loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = loop.create_future()
        self._started: asyncio.Future[None] = loop.create_future()
        self._dispatching: asyncio.Future[None] | None = None
        self._drivers: list[ChoiceDriver] = []
        self._choices: list[ChoiceWriter] = []
        self._dispatcher = Dispatcher(workers, prepared.model.card.pool, hints, record.trace)
        if prepared.detection is None:
            self._add_choices()

    def _add_choices(self) -> None:
        sampling, card = self._prepared.sampling, self._prepared.model.card
        first = first_choice(self._prepared, self.name)
        for place, prompt in enumerate(self._prepared.prompts):
            media = self._prepared.media_of(place)
            for number in range(self._per_prompt):
                index = len(self._drivers)
                # Equal seeds would give equal choices.
                choice_sampling = with_seed(sampling, number) if number else sampling
                spec = replace(first, index=index, sampling=choice_sampling) if index else first
                messages = ChoiceMessages(spec, prompt, card.block_size, self._dispatcher, media)
                self._drivers.append(ChoiceDriver(spec, messages, self._workers, self._record, self))
                self._choices.append(self._writer(index, prompt))
        self._open = len(self._drivers)

    def _writer(self, index: int, prompt: U32) -> ChoiceWriter:
        request, read_as = self._prepared.request, self._prepared.format
        detailed = request.return_token_ids or self._prepared.sampling.logprobs is not None
        encoder = self._encoder if request.stream else None
        special = not read_as.is_plain or not request.skip_special_tokens
        decoder = self._prepared.model.tokenizer.decoder(special=special, prompt=prompt)
        matcher = StopStringMatcher(
            decoder,
            list(request.stops),
            keep=request.include_stop,
            stop_tokens=frozenset(self._prepared.sampling.stop_token_ids),
        )
        if read_as.is_plain:
            return ChoiceWriter(index, matcher, encoder, detailed=detailed)
        return ParsedChoiceWriter(
            index,
            matcher,
            encoder,
            read_as.parser(),
            CallIds(self._workers.ports.ids, request.messages, request.endpoint),
            parallel=read_as.parallel,
            detailed=detailed,
            starts_in_reasoning=read_as.starts_in_reasoning,
        )

    async def run(self, client: Disconnect) -> GenerationResult | None:
        """Place every choice, then stream or collect until all ended or the client disconnected: see `Generator.run`."""
        error: ApiError | None = None
        self._workers.calls.add(self)
        try:
            if not await self._place(client):
                return None
            if self._streams:
                return await self._run_stream(client)
            return await self._run_whole(client)
        except ApiError as raised:
            error = raised
            raise
        finally:
            self._workers.calls.discard(self)
            for driver in self._drivers:
                driver.close()
            self._record_end(error)

    def abort(self, error: ApiError) -> None:
        """See `headwater.actors.edge.saga.workers.ClientCall`."""
        for driver in self._drivers:
            driver.abort(error)
        if self._dispatching is not None and not self._dispatching.done():
            self._dispatching.cancel()

    # To the workers.

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
            raise next(driver.error for driver in self._drivers if driver.error)
        dispatching.result()
        return True

    async def _place_all(self) -> None:
        """The choices of one prompt go to the worker of its first choice, which has the prompt cached."""
        if self._prepared.detection is not None:
            choice = LanguageChoice(self.name, self._prepared, self._dispatcher, self._record)
            # If the request ends now, this is what it ends.
            self._drivers = [choice.driver]
            self._prepared = self._prepared.spoken_in(await choice.language())
            self._drivers.clear()
            self._add_choices()
        pinned = ""
        for index, driver in enumerate(self._drivers):
            await driver.place(
                pinned if index % self._per_prompt else "", self._picked if not index else None
            )
            pinned = driver.saga.prefilled_by or driver.saga.attempt.worker

    # The response.

    def _headers(self) -> Headers:
        hides = self._prepared.salt.hides_usage
        headers = routing_headers(self.name, self._drivers[0].saga, hides_cached=hides)
        omitted = self._prepared.request.omitted_tools
        # A header has no room for hundreds of them.
        return (
            [*headers, (OMITTED_TOOLS, ", ".join(sorted(set(omitted))[:OMITTED_MAX]).encode())]
            if omitted
            else headers
        )

    async def _run_stream(self, client: Disconnect) -> GenerationResult | None:
        # An engine rejects a request within milliseconds of accepting it; while no headers are sent, as an HTTP status.
        if await client.or_done(self._started, HEADERS_S):
            return None
        failed = self._failure()
        if failed is not None and not any(driver.emitted for driver in self._drivers):
            raise failed
        sink, encoder = self._sink, self._encoder
        self._begin()
        await sink.start(self._headers())
        while not self._done.done():
            disconnected = await client.or_done(self._done, PING_S)
            if disconnected or sink.cut:
                return None
            if not self._done.done():
                sink.write(encoder.ping())
        failed = self._failure()
        result = None
        if failed is not None:
            sink.write(encoder.fail(failed), last=True)
        else:
            result = await self._whole_result()
            sink.write(encoder.end(result), last=True)
        await sink.settle()
        return result

    async def _whole_result(self) -> GenerationResult:
        result = self._result()
        if self._before_end is not None:
            await self._before_end(result)
        return result

    def _begin(self) -> None:
        """The first events of a stream. They are written before its headers are sent if a token arrives before."""
        if self._begun:
            return
        self._begun = True
        parts = [self._encoder.start(self._start(self._usage()))]
        if self._prepared.sampling.prompt_logprobs is None:
            parts += [self._start_choice(index) for index in range(len(self._choices))]
        if head := b"".join(parts):
            self._sink.write(head)

    def _start_choice(self, index: int) -> bytes:
        self._choices[index].prompt = detail = self._prompt_of(index)
        return self._encoder.start_choice(index, detail)

    def _prompt_of(self, index: int) -> PromptDetail | None:
        if not self._prepared.shows_prompt:
            return None
        logprobs = self._drivers[index].prompt_logprobs
        return self._prepared.prompt_detail(index // self._per_prompt, logprobs)

    async def _run_whole(self, client: Disconnect) -> GenerationResult | None:
        if not self._done.done() and await client.or_done(self._done):
            return None
        failed = self._failure()
        if failed is not None:
            raise failed
        result = await self._whole_result()
        headers = self._headers()
        await self._sink.respond(self._encoder.encode_result(result), headers)
        return result

    # From the drivers.

    def write_tokens(self, index: int, tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]) -> None:
        """See `ChoiceOutput.write_tokens`."""
        choice, driver = self._choices[index], self._drivers[index]
        if len(driver.emitted) == len(tokens):
            self._write_start(choice, driver)
        if self._wants_progress:
            self._encoder.progress(self._usage())
        if self._is_silent:
            return
        text, data = choice.push(tokens, logprobs)
        self._record.generated(index, driver.emitted, text)
        if data:
            self._sink.write(data)
        if self._has_stops and choice.stopped:
            driver.stop()

    def _write_start(self, choice: ChoiceWriter, driver: ChoiceDriver) -> None:
        choice.first_token_s = self._clock.monotonic_s()
        attempt = driver.saga.attempt
        self._record.started(driver.saga.spec.index, attempt.worker, attempt.epoch, driver.saga.cached_tokens)
        if self._streams:
            self._begin()
            if self._prepared.sampling.prompt_logprobs is not None:
                # They came with these tokens.
                self._sink.write(self._start_choice(driver.saga.spec.index))
        if not self._started.done():
            self._started.set_result(None)

    def write_end(self, index: int) -> None:
        """See `ChoiceOutput.write_end`."""
        choice, driver = self._choices[index], self._drivers[index]
        if driver.saga.end in ("stop", "length"):
            rest, data = choice.finish()
            if rest:
                self._record.generated(index, driver.emitted, rest)
            if self._streams:
                self._begin()
                self._sink.write(data + self._encoder.end_choice(index, self._end_of(index)))
        self._open -= 1
        if (self._open == 0 or driver.error) and not self._done.done():
            self._done.set_result(None)
            if not self._started.done():
                self._started.set_result(None)

    # Accounts.

    def _start(self, usage: TokenUsage) -> GenerationStart:
        return GenerationStart(self._id, self._prepared.model.card.name, self._created_s, usage)

    def _end_of(self, index: int) -> ChoiceEnd:
        return self._choices[index].end(self._drivers[index].saga.end or "stop")

    def _result(self) -> GenerationResult:
        request, per_prompt = self._prepared.request, self._per_prompt
        chosen: list[int] = []
        for first in range(0, len(self._choices), per_prompt):
            group = list(range(first, first + per_prompt))
            if per_prompt > request.choices:
                group.sort(key=lambda index: -self._choices[index].mean_logprob())
            chosen += group[: request.choices]
        choices = []
        for number, index in enumerate(chosen):
            choice = self._choices[index]
            if not request.stream:
                choice.prompt = self._prompt_of(index)
            choices.append(choice.result(number, index // per_prompt, self._end_of(index)))
        usage = self._usage()
        places, language = self._prepared.places, self._prepared.language
        return GenerationResult(self._start(usage), tuple(choices), usage, places, language)

    def _failure(self) -> ApiError | None:
        for driver in self._drivers:
            if driver.error is not None:
                return driver.error
        return None

    def _usage(self) -> TokenUsage:
        disclosed = not self._prepared.salt.hides_usage
        return TokenUsage(
            self._prompt_tokens,
            0 if self._is_silent else self._completion_tokens(),
            self._cached_tokens() if disclosed else None,
            self._written_tokens() if disclosed else None,
            reasoning_tokens=sum([choice.reasoning_tokens for choice in self._choices]),
            audio_tokens=self._prepared.audio_tokens,
        )

    @property
    def placed(self) -> bool:
        """Return whether a worker was chosen for any choice."""
        return any(driver.saga.decision is not None for driver in self._drivers)

    @property
    def tokens(self) -> int:
        """Tokens of the prompts, and of the answers so far."""
        return self._prompt_tokens + self._completion_tokens()

    def _completion_tokens(self) -> int:
        return sum([len(driver.emitted) for driver in self._drivers])

    def _cached_tokens(self) -> int:
        """A prompt counts once, so of its choices only the first does."""
        return sum([max(0, driver.saga.cached_tokens) for driver in self._drivers[:: self._per_prompt]])

    def _written_tokens(self) -> int:
        card = self._prepared.model.card
        if "kv_events" not in card.capabilities:
            return 0
        firsts = self._drivers[:: self._per_prompt]
        return sum(
            [
                written_tokens(len(prompt), driver.saga.cached_tokens, card.block_size)
                for prompt, driver in zip(self._prepared.prompts, firsts, strict=True)
            ]
        )

    def _record_end(self, error: ApiError | None) -> None:
        """Write the one terminal event."""
        failure = error or self._failure()
        ends = {driver.saga.end for driver in self._drivers}
        reason = [*[end for end in ENDS_THAT_COUNT if end in ends], "error"][0]
        first_s = min([c.first_token_s for c in self._choices if c.first_token_s], default=0.0)
        self._record.ended(
            "error" if failure is not None else reason,
            failure.logged if failure else "",
            completion_tokens=self._completion_tokens(),
            cached_tokens=self._cached_tokens(),
            migrations=sum([driver.saga.migrations for driver in self._drivers]),
            ttft_s=first_s - self._record.began_s if first_s else 0.0,
        )


# Runs generation requests, whatever their API.

NAMES_MAX: Final = 400
"""Characters of the types of tools, in a message."""

_log = structlog.get_logger("headwater.edge")


class Generator:
    """The runner of an edge's generation requests."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def prepare(self, request: GenerationRequest, call: Call) -> Prepared:
        """Check a request, count it, and encode its prompts; all that is known without a worker. Raises `ApiError`."""
        serving, quota = self._serving, call.quota
        if request.omitted_tools:
            self._omit_tools(request)
        if max(request.choices, request.best_of) > serving.settings.client.choices_max:
            raise bad_request(
                f"At most {serving.settings.client.choices_max} choices (n, best_of) of one prompt are generated here.",
                param="n",
            )
        model = serving.model(request.model, call)
        quota.enter(model.card.name)
        context = call.context(model)
        salt = serving.salts.salt_of(call.principal, model.card, request.hints.cache_salt, request.system)
        return await prepare(
            request,
            model,
            context,
            salt,
            serving.intake_of(call),
            special_tokens_in_text=serving.settings.allow_special_tokens_in_text,
        )

    def hints(self, request: GenerationRequest, call: Call) -> RoutingHints:
        """What a request's headers and fields say about routing. Raises `ApiError`."""
        request_hints = request.hints
        return parse_routing_headers(
            call.headers,
            self._serving.settings.client,
            call.principal,
            user=request_hints.user,
            session=request_hints.session,
            priority=request_hints.priority,
            opening=request.opening,
        )

    def _omit_tools(self, request: GenerationRequest) -> None:
        """Say that tools are left out. Raises `ApiError` 400 where the operator wants none to be."""
        names = ", ".join(sorted(set(request.omitted_tools)))[:NAMES_MAX]
        if self._serving.settings.hosted_tools == "reject":
            raise bad_request(
                f"Tools of type {names} are run by the servers of the API's maker, and not here; leave them out.",
                param="tools",
                code="hosted_tools",
            )
        _log.info("hosted_tools_omitted", request=request.id_prefix + request.id, tools=names)

    async def run(
        self,
        request: GenerationRequest,
        encoder: ResponseEncoder,
        call: Call,
        sink: ByteSink | None = None,
        before_end: BeforeEnd | None = None,
    ) -> GenerationResult | None:
        """Answer a request, streamed or whole, through `sink` (by default as the HTTP response of `call`).

        `before_end` is awaited with the whole answer before the client learns that it is whole.

        Returns the whole answer, None if the client disconnected before its end or if it ended with an error after the
        headers of a stream were sent. Raises `ApiError` before anything was sent.
        """
        serving, quota = self._serving, call.quota
        prepared = await self.prepare(request, call)
        serving.require_open()
        hints = self.hints(request, call)
        id_ = request.id or call.make_id(serving.workers.ports.ids)
        answers = len(prepared.prompts) * prepared.per_prompt
        prompt_tokens = prepared.prompt_tokens
        quota.reserve(prompt_tokens, request.max_tokens and prepared.sampling.max_tokens, answers)
        record = serving.record(
            request.id_prefix + id_, prepared.model, request.endpoint, call, answers=answers
        )
        generation = Generation(
            serving.workers,
            prepared,
            encoder,
            sink or HttpSink(call.send),
            record,
            id_,
            hints=hints,
            before_end=before_end,
            picked=call.picked,
        )
        record.accepted(
            prompt_tokens,
            answers,
            call.body,
            max_tokens=prepared.sampling.max_tokens,
            stream=request.stream,
            media=prepared.media,
            flow=hints.flow,
            media_s=prepared.media_s,
        )
        has_media = prepared.media or prepared.chunks
        # Workers can fetch the request's media for as long as it runs.
        held = serving.workers.media.hold(prepared.held) if has_media else nullcontext()
        client = Disconnect(call.receive)
        try:
            with TimeLimit(serving.settings.request_timeout_s, generation.abort), held:
                return await generation.run(client)
        finally:
            client.stop()
            if generation.placed:
                quota.settle(generation.tokens)
