"""The reader of an engine's KV events: it receives them from a ZMQ socket, and requests missed ones.

vLLM and SGLang number their batches from 0 in each process. Missing batches are requested from the replay socket, which has the last
10,000; older ones are published as a gap. The epoch is that of the worker's lease.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog
import zmq
import zmq.asyncio

from headwater.engines.engine import KvEvent
from headwater.engines.kv_events import KvTranslator, decode

REPLAY_TIMEOUT_MS = 2_000

JOIN_CHECK_S = 2.0
"""A subscription takes effect a moment after it was made, and neither side reports when. Until a batch has arrived by it, batches are looked for in the replay so
often: else one that was published before is missed until the next one, which an idle engine does not have."""

END = (1 << 64) - 1

_log = structlog.get_logger("headwater.kv_events")


class KvSocket:
    """One engine's events, in order, with explicit gaps."""

    def __init__(self, endpoint: str, replay_endpoint: str, translator: KvTranslator) -> None:
        self._context = zmq.asyncio.Context()
        self._replay_endpoint = replay_endpoint
        self._translator = translator
        self._next = 0
        self._joined = False
        """A batch has arrived by the subscription, so no later one is lost without a hole in the numbers."""
        self._own: list[KvEvent] = []
        self._own_ready = asyncio.Event()
        self._socket = self._context.socket(zmq.SUB)
        # Unbounded, so that the subscriber drops nothing: the engine's own queue is bounded.
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(endpoint)

    async def events(self) -> AsyncIterator[list[KvEvent]]:
        """Translated events, batch by batch, until cancelled. One reader."""
        arriving: asyncio.Future[list[bytes]] | None = None
        own_ready = asyncio.ensure_future(self._own_ready.wait())
        try:
            while True:
                if arriving is None:
                    arriving = asyncio.ensure_future(self._socket.recv_multipart())
                waiting: set[asyncio.Future[Any]] = {arriving, own_ready}
                check_s = None if self._joined else JOIN_CHECK_S
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=check_s)
                if not done:
                    if translated := await self._take_missed():
                        yield translated
                    continue
                # The clear precedes what arrives: it makes that outdated.
                if own_ready.done():
                    self._own_ready.clear()
                    own_ready = asyncio.ensure_future(self._own_ready.wait())
                    if self._own:
                        yield self._take_own()
                    continue
                frames, arriving, self._joined = arriving.result(), None, True
                translated = await self.accept(int.from_bytes(frames[1], "big"), frames[2])
                if translated:
                    yield translated
        finally:
            for future in (arriving, own_ready):
                if future is not None:
                    future.cancel()

    def expect_clear(self) -> None:
        """Call before requesting that the engine clears its cache."""
        self._translator.expect_clear()

    def confirm_clear(self) -> None:
        """The engine has cleared its cache."""
        self._own += self._translator.confirm_clear(time.time())
        self._own_ready.set()

    def discard_pending(self) -> None:
        """Discard events of `confirm_clear` that `events` has not yielded yet."""
        self._own.clear()

    async def accept(self, number: int, payload: bytes) -> list[KvEvent]:
        """Process batch `number`: skip a repeated one, request missing ones before it."""
        if number < self._next:
            return []
        missing = number - self._next
        translated = await self._take_missed(number) if missing else []
        # No await from here on: translated events are returned before any other change.
        translated += self._take_own()
        if self._next < number:
            lost = number - self._next
            _log.error("kv_events_lost", missing=missing, lost=lost)
            # Blocks from before the gap may be gone: start with an empty state.
            translated = self._translator.lost(lost)
        elif missing:
            _log.warning("kv_events_replayed", missing=missing)
        translated += self._translate(payload)
        self._next = number + 1
        return translated

    async def _take_missed(self, until: int = END) -> list[KvEvent]:
        """The events of the next batches, before batch `until`, that the publisher still has."""
        missed = await self._replay(self._next, until)
        translated = self._take_own()
        for number, data in missed:
            if number > self._next:
                break
            if number == self._next:
                translated += self._translate(data)
                self._next += 1
        return translated

    async def _replay(self, start: int, until: int) -> list[tuple[int, bytes]]:
        """Return those of the batches `start` to `until` - 1 that the publisher still has."""
        socket = self._context.socket(zmq.DEALER)
        batches: list[tuple[int, bytes]] = []
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVTIMEO, REPLAY_TIMEOUT_MS)
            socket.connect(self._replay_endpoint)
            await socket.send_multipart([b"", start.to_bytes(8, "big")])
            while True:
                # Empty, topic (older versions leave it out), number, payload.
                frames = await socket.recv_multipart()
                number = int.from_bytes(frames[-2], "big")
                if number == END or not frames[-1]:
                    return batches
                if start <= number < until:
                    batches.append((number, frames[-1]))
        except zmq.Again:
            if self._joined:
                _log.warning("kv_replay_unanswered", after_ms=REPLAY_TIMEOUT_MS)
            return batches
        finally:
            socket.close()

    def _take_own(self) -> list[KvEvent]:
        own_events, self._own = self._own, []
        return own_events

    def _translate(self, payload: bytes) -> list[KvEvent]:
        try:
            batch = decode(payload)
            return self._translator.translate(batch.events, batch.at_s)
        except (msgspec.DecodeError, ValueError, LookupError, TypeError, ArithmeticError) as error:
            _log.error("kv_events_unreadable", reason=repr(error))
            return self._translator.lost(1)

    def close(self) -> None:
        """Close the sockets."""
        self._context.destroy(linger=0)


# The addresses at which an engine publishes its KV events on this machine.

EVENTS: Final = "inproc-events"
REPLAY: Final = "inproc-replay"
"""Names of the sockets in the engine's own folder. vLLM and SGLang derive an endpoint for each rank from the given one, for tcp
and inproc only, which they detect by these words: with this name they add a suffix to Unix sockets."""


def in_folder(folder: Path) -> tuple[str, str]:
    """Endpoints for events and their replay. Unix sockets: no port conflicts, no access from outside."""
    events, replay = (f"ipc://{folder / name}" for name in (EVENTS, REPLAY))
    return events, replay


def reachable(endpoint: str) -> str:
    """Return the address to connect to for a socket that is bound to `endpoint` on this machine."""
    for everywhere, loopback in (
        ("tcp://*:", "127.0.0.1"),
        ("tcp://0.0.0.0:", "127.0.0.1"),
        ("tcp://[::]:", "[::1]"),
    ):
        if endpoint.startswith(everywhere):
            return f"tcp://{loopback}:" + endpoint.removeprefix(everywhere)
    return endpoint
