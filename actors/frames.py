"""Token frames: what an engine actor has for the edges, packed per edge and step.

Also remembers what each request got so far, so that an edge that lost a frame (a server restart, a slow
reader) asks once and catches up: frames themselves are sent at most once.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable

import msgspec
import structlog

from headwater.actors.bus_port import Bus, BusError
from headwater.engines.engine import Step
from headwater.schemas.handoff import Handoff
from headwater.schemas.inference import (
    FrameEntry,
    GenerateRequest,
    StatusReply,
    TokenFrame,
    TokenLogprob,
)
from headwater.schemas.subjects import edge_frames

ENDED_MAX = 4_096
"""Ended requests remembered for edges that missed the last frame; the oldest is forgotten first."""

_encoder = msgspec.msgpack.Encoder()
_log = structlog.get_logger("headwater.frames")


class Outgoing:
    """One request's tokens so far."""

    __slots__ = ("cached", "detail", "edge", "finish", "handle", "handoff", "logprobs", "param", "tokens")

    def __init__(self, request: GenerateRequest) -> None:
        self.edge = request.edge
        self.handle = request.handle
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.cached = -1
        self.finish = ""
        self.detail = ""
        self.param = ""
        self.handoff: Handoff | None = None

    def entry(self, received: int) -> FrameEntry:
        """Everything after the first `received` tokens."""
        return FrameEntry(
            self.handle,
            received,
            tuple(self.tokens[received:]),
            self.finish,
            self.cached,
            tuple(self.logprobs[received:]),
            self.detail,
            self.handoff,
            self.param,
        )


class FrameSender:
    """Collects steps and sends one message per edge whenever the loop gets to it.

    `stepped` is called once for all entries that come before the loop gets to it, so about once for each engine step.
    """

    def __init__(self, bus: Bus, ns: str, worker: str) -> None:
        self._bus = bus
        self._ns = ns
        self._worker = worker
        self.epoch = 0
        self.active: dict[str, Outgoing] = {}
        self.tokens = 0
        self.stepped: Callable[[], None] | None = None
        self._ended: OrderedDict[str, Outgoing] = OrderedDict()
        self._outbox: dict[str, list[FrameEntry]] = {}
        self._wake = asyncio.Event()
        self._sent = asyncio.Event()
        self._sent.set()

    def open(self, request: GenerateRequest) -> None:
        """A request was taken by the engine."""
        self.active[request.request] = Outgoing(request)

    def knows(self, request: str) -> bool:
        """Does the engine have it, or has it had it lately?"""
        return request in self.active or request in self._ended

    def step(self, request: str, step: Step) -> None:
        """The engine has something for a request."""
        stream = self.active.get(request)
        if stream is None:
            return
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
        )
        stream.tokens += step.tokens
        stream.logprobs += step.logprobs
        self.tokens += len(step.tokens)
        if step.cached_tokens >= 0:
            stream.cached = step.cached_tokens
        if step.finish:
            self._end(request, stream, step.finish, step)
        self._send(stream, entry)

    def prefilled(self, request: str, step: Step, handoff: Handoff | None) -> None:
        """The engine has something for a prefill leg: its tokens are nobody's, what it leaves is told."""
        stream = self.active.get(request)
        if stream is None:
            return
        stream.cached = max(stream.cached, step.cached_tokens)
        stream.handoff = handoff
        if step.finish in ("stop", "length"):
            self._end(request, stream, "handoff", step)
        elif step.finish:
            self._end(request, stream, step.finish, step)
        elif step.pinned is None:
            return
        self._send(stream, stream.entry(0))

    def _end(self, request: str, stream: Outgoing, finish: str, step: Step) -> None:
        stream.finish, stream.detail, stream.param = finish, step.detail, step.param
        self._ended[request] = self.active.pop(request)
        if len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)

    def _send(self, stream: Outgoing, entry: FrameEntry) -> None:
        if not self._outbox and self.stepped is not None:
            self.stepped()
        self._outbox.setdefault(stream.edge, []).append(entry)
        self._sent.clear()
        self._wake.set()

    def status(self, request: str, received: int) -> StatusReply:
        """What an edge that has `received` tokens of a request is missing."""
        stream = self.active.get(request) or self._ended.get(request)
        if stream is None or received > len(stream.tokens):
            return StatusReply(False)
        return StatusReply(True, stream.entry(received))

    async def run(self) -> None:
        """Send for ever."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            outbox, self._outbox = self._outbox, {}
            for edge, entries in outbox.items():
                data = _encoder.encode(TokenFrame(self._worker, self.epoch, tuple(entries)))
                try:
                    await self._bus.publish(edge_frames(self._ns, edge), data)
                except BusError as error:
                    # The edge notices by position, or by silence, and asks for what it misses.
                    _log.warning("frame_not_sent", edge=edge, entries=len(entries), reason=str(error))
            if not self._outbox:
                self._sent.set()

    async def flush(self) -> None:
        """Wait until everything so far is handed to the bus. `run` must be running."""
        await self._sent.wait()
