"""The endpoint picker protocol (1.0.0) of the Gateway API Inference Extension, over Envoy's external processing: one request of a gateway.

    request headers, body ──► endpoints as a header and as metadata, or an immediate response
    response headers      ──► the endpoint that served is noted

Gateways send bodies as they arrive (FULL_DUPLEX_STREAMED: the headers' answer waits for the whole body, which is sent back after it), or
whole (BUFFERED), or not at all. Responses pass through unread.
"""

from collections.abc import Iterator
from typing import Any, Final

import structlog

from headwater.actors import metrics
from headwater.actors.edge.apis.anthropic import respond_error
from headwater.actors.edge.saga.http_call import DECISION_HEADER
from headwater.actors.http.asgi import Headers
from headwater.actors.http.body import UNCOUNTED_BYTES, Bodies
from headwater.actors.http.errors import ApiError
from headwater.actors.picker import messages as ext_proc
from headwater.actors.picker.pick import Asked, Pick, Picker, Subset
from headwater.engines.logs import failure_place

DESTINATION: Final = "x-gateway-destination-endpoint"
NAMESPACE: Final = "envoy.lb"
SERVED: Final = "x-gateway-destination-endpoint-served"
SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
SUBSET: Final = "x-gateway-destination-endpoint-subset"
DECISION: Final = DECISION_HEADER.decode()

ATTRIBUTES: Final = "envoy.filters.http.ext_proc"
UPSTREAM: Final = "upstream.address"
"""The attribute from which the endpoint that served is read where a gateway sends no metadata for it, as Envoy by itself does not."""

CHUNK_BYTES: Final = 62_000
"""Pieces in which a body is sent back: gateways take up to 64 KiB."""

_log = structlog.get_logger("headwater.picker")

Response = ext_proc.ProcessingResponse

Message = Any
"""A message of the protocol: its classes are made when they are imported, and have no types."""


class Exchange:
    """One request. `take` gets the gateway's messages in order; `end` is called once, at the end of their stream."""

    def __init__(self, picker: Picker, bodies: Bodies) -> None:
        self._picker = picker
        self._bodies = bodies
        self._method = self._path = ""
        self._headers: Headers = []
        self._subset: Subset = None
        self._request_mode = self._response_mode = ext_proc.FULL_DUPLEX_STREAMED
        self._parts: list[bytes] = []
        self._bytes = self._counted = 0
        self._pick: Pick | None = None
        self._answered = False

    async def take(self, message: Message) -> list[Message]:
        """Answer a message."""
        if message.HasField("protocol_config"):
            self._request_mode = message.protocol_config.request_body_mode
            self._response_mode = message.protocol_config.response_body_mode
        kind = message.WhichOneof("request")
        try:
            match kind:
                case "request_headers":
                    return await self._take_headers(message)
                case "request_body":
                    return await self._take_body(message.request_body)
                case "request_trailers":
                    return await self._take_trailers()
                case "response_headers":
                    self._note_served(message)
                    return [Response(response_headers=ext_proc.HeadersResponse())]
                case "response_body":
                    return [self._pass(message.response_body)]
                case "response_trailers":
                    return [Response(response_trailers=ext_proc.TrailersResponse())]
                case _:
                    return []
        except ApiError as error:
            metrics.PICKER_PICKS.labels("shed" if error.status == 429 else "refused").inc()
            _log.info("pick_refused", path=self._path, status=error.status, reason=error.logged)
            self._answered = True
            return [await _immediate(self._path, error)]

    def end(self, *, aborted: bool) -> None:
        """The stream ended, `aborted` by the gateway or in order.

        Before a response its client has left. Envoy ends the stream in order then, too; but so does a gateway that is not configured to
        send the headers of responses, and whose request is on its way: it has never sent any.
        """
        self._forget_body()
        lost = aborted or self._picker.sees_responses
        if lost and self._pick is not None and not self._answered:
            self._picker.withdraw(self._pick)

    # The request.

    async def _take_headers(self, message: Message) -> list[Message]:
        for header in message.request_headers.headers.headers:
            value = header.raw_value or header.value.encode()
            if header.key == ":path":
                self._path = value.decode("latin-1").partition("?")[0]
            elif header.key == ":method":
                self._method = value.decode("latin-1")
            else:
                self._headers.append((header.key.encode(), value))
        self._subset = subset_of(message.metadata_context.filter_metadata)
        mode = self._request_mode
        if message.request_headers.end_of_stream or mode in (ext_proc.NONE, ext_proc.STREAMED):
            return [await self._picked_by_headers()]
        if mode in (ext_proc.BUFFERED, ext_proc.BUFFERED_PARTIAL):
            return [Response(request_headers=ext_proc.HeadersResponse())]
        return []

    async def _take_body(self, body: Message) -> list[Message]:
        if self._request_mode != ext_proc.FULL_DUPLEX_STREAMED:
            if self._pick is not None:
                return [Response(request_body=ext_proc.BodyResponse())]
            self._parts = [body.body]
            answer = Response()
            _write_pick(answer, answer.request_body, await self._choose(whole=body.end_of_stream))
            return [answer]
        if self._pick is not None:
            return list(_chunks(body.body, end=body.end_of_stream))
        self._parts.append(body.body)
        fits = self._count(len(body.body))
        if fits and not body.end_of_stream:
            return []
        buffered_body = b"".join(self._parts)
        headers = await self._picked_by_headers(whole=fits)
        return [headers, *_chunks(buffered_body, end=body.end_of_stream)]

    async def _take_trailers(self) -> list[Message]:
        answers: list[Message] = []
        if self._pick is None:
            buffered_body = b"".join(self._parts)
            answers = [await self._picked_by_headers(), *_chunks(buffered_body, end=False)]
        return [*answers, Response(request_trailers=ext_proc.TrailersResponse())]

    def _count(self, size: int) -> bool:
        """Count the bytes of a body in flight; False if it is too large to be kept."""
        self._bytes += size
        if self._bytes <= UNCOUNTED_BYTES:
            return True
        try:
            self._bodies.check(self._bytes, self._counted)
        except ApiError:
            return False
        self._bodies.in_flight_bytes += self._bytes - self._counted
        self._counted = self._bytes
        return True

    def _forget_body(self) -> None:
        self._bodies.in_flight_bytes -= self._counted
        self._counted, self._parts = 0, []

    async def _picked_by_headers(self, *, whole: bool = True) -> Message:
        answer = Response()
        _write_pick(answer, answer.request_headers, await self._choose(whole=whole))
        return answer

    async def _choose(self, *, whole: bool) -> Pick:
        """Pick. Without the `whole` body the endpoint is the next in turn. Raises `ApiError`."""
        began_s = self._picker.clock.monotonic_s()
        body = b"".join(self._parts)
        gateway_request = Asked(self._method, self._path, self._headers, body, self._subset)
        try:
            pick = (
                await self._picker.pick(gateway_request) if whole else self._picker.next_in_turn(self._subset)
            )
        except ApiError:
            raise
        except Exception as error:
            # A bug here costs the decision, not the request.
            _log.error("pick_failed", path=self._path, failure=failure_place(error))
            _log.debug("pick_failure", exc_info=True)
            pick = self._picker.next_in_turn(self._subset)
        self._pick = pick
        self._forget_body()
        metrics.PICKER_PICKS.labels("decided" if pick.decided is not None else "undecided").inc()
        metrics.PICKER_SECONDS.observe(self._picker.clock.monotonic_s() - began_s)
        if pick.decided is not None:
            decision = pick.decided.decision
            _log.debug(
                "pick_made", attempt=decision.request, worker=decision.worker, endpoints=pick.endpoints
            )
        return pick

    # The response.

    def _note_served(self, message: Message) -> None:
        pick = self._pick
        self._answered = self._picker.sees_responses = True
        if pick is None:
            return
        if status_of(message) >= 400:
            # An edge that refused it, as for a rate limit, sent it to no worker. To one that has accepted it this does nothing.
            self._picker.withdraw(pick)
        served = served_by(message)
        attempt = pick.decided.decision.request if pick.decided is not None else ""
        _log.debug("pick_served", attempt=attempt, picked=pick.endpoints[0], served=served)
        if served and served != pick.endpoints[0]:
            metrics.PICKER_DIVERTED.inc()
            _log.warning("pick_diverted", attempt=attempt, picked=pick.endpoints, served=served)

    def _pass(self, body: Message) -> Message:
        answer = ext_proc.BodyResponse()
        if self._response_mode == ext_proc.FULL_DUPLEX_STREAMED:
            piece = ext_proc.StreamedBodyResponse(body=body.body, end_of_stream=body.end_of_stream)
            mutation = ext_proc.BodyMutation(streamed_response=piece)
            answer = ext_proc.BodyResponse(response=ext_proc.CommonResponse(body_mutation=mutation))
        return Response(response_body=answer)


def subset_of(metadata: Any) -> Subset:
    """The endpoints that a gateway's metadata allows: a list of texts, or one text; either separates several by commas."""
    if SUBSET_NAMESPACE not in metadata:
        return None
    fields = metadata[SUBSET_NAMESPACE].fields
    if SUBSET not in fields:
        return None
    value = fields[SUBSET]
    texts = [entry.string_value for entry in value.list_value.values] or [value.string_value]
    return frozenset(entry.strip() for text in texts for entry in text.split(",") if entry.strip())


def served_by(message: Message) -> str:
    """The endpoint that served a response, "" if the gateway does not say."""
    metadata = message.metadata_context.filter_metadata
    if NAMESPACE in metadata and SERVED in metadata[NAMESPACE].fields:
        return str(metadata[NAMESPACE].fields[SERVED].string_value)
    attributes = message.attributes
    if ATTRIBUTES in attributes and UPSTREAM in attributes[ATTRIBUTES].fields:
        return str(attributes[ATTRIBUTES].fields[UPSTREAM].string_value)
    return ""


def status_of(message: Message) -> int:
    """The status of a response, 0 if it is not there."""
    for header in message.response_headers.headers.headers:
        if header.key == ":status":
            return int(header.raw_value or header.value or 0)
    return 0


def _write_pick(answer: Message, part: Message, pick: Pick) -> None:
    """Write a pick into an answer whose `part` is that of the headers or of the body.

    In place: a message that is given to another one's constructor is copied, at each level.
    """
    endpoints = ",".join(pick.endpoints)
    answer.dynamic_metadata.fields[NAMESPACE].struct_value.fields[DESTINATION].string_value = endpoints
    mutation = part.response.header_mutation
    _set_header(mutation, DESTINATION, endpoints.encode())
    if pick.sealed:
        _set_header(mutation, DECISION, pick.sealed)
    else:
        # Not even one that is forged gets to the edge.
        mutation.remove_headers.append(DECISION)


def _set_header(mutation: Message, name: str, value: bytes) -> None:
    option = mutation.set_headers.add()
    option.header.key, option.header.raw_value = name, value
    option.append_action = ext_proc.OVERWRITE_IF_EXISTS_OR_ADD


def _chunks(body: bytes, *, end: bool) -> Iterator[Message]:
    """A body in pieces; the last of them ends it, if it does."""
    for begin in range(0, len(body), CHUNK_BYTES) or (0,):
        piece = body[begin : begin + CHUNK_BYTES]
        last = end and begin + CHUNK_BYTES >= len(body)
        mutation = ext_proc.BodyMutation(
            streamed_response=ext_proc.StreamedBodyResponse(body=piece, end_of_stream=last)
        )
        common = ext_proc.CommonResponse(body_mutation=mutation)
        yield Response(request_body=ext_proc.BodyResponse(response=common))


async def _immediate(path: str, error: ApiError) -> Message:
    """The error as an edge would send it."""
    answer = ext_proc.ImmediateResponse()

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            answer.status.CopyFrom(ext_proc.HttpStatus(code=message["status"]))
            for name, value in message["headers"]:
                # Envoy counts the bytes itself.
                if name != b"content-length":
                    option = answer.headers.set_headers.add()
                    option.header.key, option.header.raw_value = name.decode(), value
        else:
            answer.body += message.get("body", b"")

    await respond_error(send, path, error, "")
    return Response(immediate_response=answer)
