"""Runs generation requests, whatever their API: from the internal request to the last byte of the response."""

from contextlib import AbstractContextManager, nullcontext
from typing import Final

import structlog

from headwater.actors.edge.generation.encoder import ResponseEncoder
from headwater.actors.edge.generation.events import GenerationResult
from headwater.actors.edge.generation.prepare import Prepared, prepare
from headwater.actors.edge.generation.request import GenerationRequest
from headwater.actors.edge.generation.run import BeforeEnd, Generation
from headwater.actors.edge.generation.sink import ByteSink, HttpSink
from headwater.actors.edge.limits.time_limit import TimeLimit
from headwater.actors.edge.request.context import Call, Serving
from headwater.actors.edge.request.routing_hints import parse_routing_headers
from headwater.actors.http.asgi import Disconnect
from headwater.actors.http.errors import bad_request

NOTHING: Final = nullcontext()
"""What a request without media holds."""

NAMES_MAX: Final = 400
"""Characters of the types of tools, in a message."""

_log = structlog.get_logger("headwater.edge")


class Generator:
    """One per edge."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def prepare(self, request: GenerationRequest, call: Call) -> Prepared:
        """Check a request, count it, and encode its prompts; all that is known without a worker. Raises `ApiError`."""
        serving, quota = self._serving, call.quota
        if request.omitted_tools:
            self._omit_tools(request)
        model = serving.model(request.model, call.principal)
        quota.enter(model.card.name)
        context = quota.context(model.card.name, model.card.context_length)
        salt = serving.salts.salt_of(call.principal, model.card, request.hints.cache_salt, request.system)
        return await prepare(
            request,
            model,
            context,
            salt,
            serving.intake_of(call.headers, call.principal),
            special_tokens_in_text=serving.special_tokens_in_text,
        )

    def _omit_tools(self, request: GenerationRequest) -> None:
        """Say that tools are left out. Raises `ApiError` 400 where the operator wants none to be."""
        names = ", ".join(sorted(set(request.omitted_tools)))[:NAMES_MAX]
        if self._serving.hosted_tools == "reject":
            raise bad_request(
                f"Tools of type {names} are run by the servers of the API's maker, and not here; leave them out.",
                param="tools",
                code="hosted_tools",
            )
        _log.info("hosted_tools_omitted", request=request.id_prefix + request.id, tools=names)

    def _held(self, prepared: Prepared) -> AbstractContextManager[None]:
        """While it is entered, workers can fetch the request's media."""
        if not prepared.media and not prepared.chunks:
            return NOTHING
        return self._serving.workers.media.hold(prepared.held)

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
        hints = parse_routing_headers(
            call.headers,
            serving.limits,
            call.principal,
            user=request.hints.user,
            session=request.hints.session,
            priority=request.hints.priority,
        )
        id_ = request.id or serving.workers.ports.ids()
        name = request.id_prefix + id_
        answers = len(prepared.prompts) * prepared.per_prompt
        prompt_tokens = prepared.prompt_tokens
        quota.reserve(prompt_tokens, request.max_tokens and prepared.sampling.max_tokens, answers)
        record = serving.record(name, prepared.model, request.endpoint, call.trace, answers=answers)
        generation = Generation(
            serving.workers,
            prepared,
            encoder,
            sink or HttpSink(call.send),
            record,
            id_,
            hints=hints,
            before_end=before_end,
        )
        record.accepted(
            prompt_tokens,
            answers,
            call.body,
            max_tokens=prepared.sampling.max_tokens,
            stream=request.stream,
            media=prepared.media,
        )
        client = Disconnect(call.receive)
        try:
            with TimeLimit(serving.request_timeout_s, generation.abort), self._held(prepared):
                return await generation.run(client)
        finally:
            client.stop()
            if generation.placed:
                quota.settle(generation.tokens)
