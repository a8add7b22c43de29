"""Token frames: the tokens of a worker's requests, packed into one message per edge and engine step.

Frames are delivered at most once. The sender keeps what each request has received so far, so that an edge that lost a
frame (a server restart, a slow reader) catches up with one status query.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Final

import msgspec
import structlog

from headwater.actors.runtime.ports import Bus, BusError
from headwater.engines.engine import Step
from headwater.schemas.inference import (
    FrameEntry,
    GenerateRequest,
    Handoff,
    StatusReply,
    TokenFrame,
    TokenLogprob,
)
from headwater.schemas.subjects import edge_frames

ENDED_MAX = 4_096
"""Ended requests kept for edges that missed the last frame; the oldest is dropped first."""

FRAME_BYTES_MAX: Final = 512 * 1024
"""A longer frame is sent in parts: the server accepts messages of 1 MiB by default."""

LOGPROBS_MAX: Final = 32_768
"""Log probabilities in one message, of the prompt and the answer: less than a MiB. The edge refuses prompts with more."""

_encoder = msgspec.msgpack.Encoder()
_log = structlog.get_logger("headwater.frames")


class TokenStream(msgspec.Struct):
    """One request's tokens so far."""

    edge: str
    edge_epoch: int
    handle: int
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    cached: int = -1
    finish: str = ""
    detail: str = ""
    param: str = ""
    handoff: Handoff | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()

    def entry(self, received: int) -> FrameEntry:
        """Return what follows the first `received` tokens: all of it, or as many tokens as have room for their log probabilities.

        Only with the last tokens does the entry have the end: without it the edge asks again.
        """
        scores = self.prompt_logprobs if not received else ()
        end = self._end_of_message(received, LOGPROBS_MAX - sum(map(_count, scores)))
        is_complete = end == len(self.tokens)
        return FrameEntry(
            self.handle,
            received,
            tuple(self.tokens[received:end]),
            self.finish if is_complete else "",
            self.cached,
            tuple(self.logprobs[received:end]),
            self.detail if is_complete else "",
            self.handoff if is_complete else None,
            self.param if is_complete else "",
            scores,
        )

    def _end_of_message(self, received: int, room: int) -> int:
        end = len(self.tokens)
        for number in range(received, len(self.logprobs)):
            room -= _count(self.logprobs[number])
            if room < 0 and number > received:
                return number
        return end


class FrameSender:
    """Collects entries and sends them as one message per edge each time its loop runs.

    `on_step` is called with the first entry after each run of the loop: about once for each engine step.
    """

    def __init__(self, bus: Bus, ns: str, worker: str, on_step: Callable[[], None] | None = None) -> None:
        self._bus = bus
        self._ns = ns
        self._worker = worker
        self.epoch = 0
        self._on_step = on_step
        self._streams: dict[str, TokenStream] = {}
        self._ended: OrderedDict[str, TokenStream] = OrderedDict()
        self._outbox: dict[str, list[FrameEntry]] = {}
        self._wake = asyncio.Event()
        self._sent = asyncio.Event()
        self._sent.set()

    def open_stream(self, request: GenerateRequest) -> None:
        """Send what the engine generates for a request from now on."""
        self._streams[request.request] = TokenStream(request.edge, request.edge_epoch, request.handle)

    def drop_stream(self, request: str) -> None:
        """The engine rejected the request: there is nothing to send."""
        self._streams.pop(request, None)

    @property
    def open_streams(self) -> list[str]:
        """Requests whose last step has not come."""
        return list(self._streams)

    def streams_by_edge(self) -> dict[tuple[str, int], dict[int, str]]:
        """Open streams of edges that answer for theirs: request by handle, by edge and its epoch."""
        by_edge: dict[tuple[str, int], dict[int, str]] = {}
        for request, stream in self._streams.items():
            if stream.edge_epoch:
                by_edge.setdefault((stream.edge, stream.edge_epoch), {})[stream.handle] = request
        return by_edge

    def has_stream(self, request: str) -> bool:
        """Was a stream opened for the request, and not dropped since?"""
        return request in self._streams or request in self._ended

    def send_step(self, request: str, step: Step) -> int:
        """Queue the new tokens of a request. Returns how many; 0 if its stream has ended."""
        stream = self._streams.get(request)
        if stream is None:
            return 0
        entry = FrameEntry(
            stream.handle,
            len(stream.tokens),
            step.tokens,
            step.finish,
            step.cached_tokens,
            step.logprobs,
            step.detail,
            None,
            step.param,
            step.prompt_logprobs,
        )
        stream.tokens += step.tokens
        stream.logprobs += step.logprobs
        if step.prompt_logprobs:
            stream.prompt_logprobs = step.prompt_logprobs
        if step.cached_tokens >= 0:
            stream.cached = step.cached_tokens
        if step.finish:
            self._end(request, stream, step.finish, step)
        self._send(stream, entry)
        return len(step.tokens)

    def send_prefill(self, request: str, step: Step, handoff: Handoff | None) -> None:
        """Queue the result of a prefill leg: its hand-off; the tokens that it generated are not sent."""
        stream = self._streams.get(request)
        if stream is None:
            return
        stream.cached = max(stream.cached, step.cached_tokens)
        if step.prompt_logprobs:
            stream.prompt_logprobs = step.prompt_logprobs
        stream.handoff = handoff
        if step.finish in ("stop", "length"):
            self._end(request, stream, "handoff", step)
        elif step.finish:
            self._end(request, stream, step.finish, step)
        elif step.pinned is None:
            return
        self._send(stream, stream.entry(0))

    def _end(self, request: str, stream: TokenStream, finish: str, step: Step) -> None:
        stream.finish, stream.detail, stream.param = finish, step.detail, step.param
        self._ended[request] = self._streams.pop(request)
        if len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)

    def _send(self, stream: TokenStream, entry: FrameEntry) -> None:
        if not self._outbox and self._on_step is not None:
            self._on_step()
        self._outbox.setdefault(stream.edge, []).append(entry)
        self._sent.clear()
        self._wake.set()

    def status(self, request: str, received: int) -> StatusReply:
        """The tokens of a request after the first `received`."""
        stream = self._streams.get(request) or self._ended.get(request)
        if stream is None or received > len(stream.tokens):
            return StatusReply(False)
        return StatusReply(True, stream.entry(received))

    async def run(self) -> None:
        """Send frames. Does not return."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            outbox, self._outbox = self._outbox, {}
            for edge, entries in outbox.items():
                for data in self._frames(tuple(entries)):
                    try:
                        await self._bus.publish(edge_frames(self._ns, edge), data)
                    except BusError as error:
                        # The edge detects the gap by position, or by silence, and queries the status.
                        _log.warning(
                            "frame_publish_failed", edge=edge, entries=len(entries), reason=str(error)
                        )
            if not self._outbox:
                self._sent.set()

    def _frames(self, entries: tuple[FrameEntry, ...]) -> Iterator[bytes]:
        """One frame, or several where log probabilities of many tokens make it too long."""
        data = _encoder.encode(TokenFrame(self._worker, self.epoch, entries))
        if len(data) <= FRAME_BYTES_MAX or len(entries) == 1:
            yield data
            return
        middle = len(entries) // 2
        yield from self._frames(entries[:middle])
        yield from self._frames(entries[middle:])

    async def flush(self) -> None:
        """Wait until everything so far is handed to the bus. `run` must be running."""
        await self._sent.wait()


def _count(logprob: TokenLogprob | None) -> int:
    """Return how many log probabilities one token has, its own among them."""
    return 0 if logprob is None else 1 + len(logprob.top)
