"""Reading vLLM's KV events from its ZMQ socket, and asking for what was missed.

vLLM numbers its batches from 0 in each process. A hole is asked for at the replay socket, which holds the last
10,000 batches; what is gone from there is a gap, told as such. The epoch is not vLLM's to give: it is the
worker's lease.
"""

from collections.abc import AsyncIterator

import msgspec
import structlog
import zmq
import zmq.asyncio

from headwater.engines.engine import KvEvent
from headwater.engines.vllm.kv_events import KvTranslator, decode

REPLAY_TIMEOUT_MS = 2_000
END = (1 << 64) - 1

_log = structlog.get_logger("headwater.vllm.kv")


class KvSocket:
    """One engine's events, in order, without silent holes."""

    def __init__(self, endpoint: str, replay_endpoint: str, translator: KvTranslator) -> None:
        self._context = zmq.asyncio.Context()
        self._replay_endpoint = replay_endpoint
        self._translator = translator
        self._next = 0
        self._socket = self._context.socket(zmq.SUB)
        # Never let the subscriber's queue drop: the engine's own bound is the one that counts.
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(endpoint)

    async def events(self) -> AsyncIterator[list[KvEvent]]:
        """Our events, batch by batch, for ever."""
        while True:
            frames = await self._socket.recv_multipart()
            ours = await self.accept(int.from_bytes(frames[1], "big"), frames[2])
            if ours:
                yield ours

    async def accept(self, number: int, payload: bytes) -> list[KvEvent]:
        """Take batch `number`: skip a repeated one, fetch the missing ones before it."""
        if number < self._next:
            return []
        ours: list[KvEvent] = []
        if number > self._next:
            ours += await self._fill(number)
        ours += self._translate(payload)
        self._next = number + 1
        return ours

    async def _fill(self, until: int) -> list[KvEvent]:
        """Batches `self._next` to `until` - 1 from the replay socket, or a gap for those that are gone."""
        missing = until - self._next
        ours: list[KvEvent] = []
        for number, payload in await self._replay(self._next):
            if number < self._next or number >= until:
                continue
            if number > self._next:
                break
            ours += self._translate(payload)
            self._next = number + 1
        if self._next < until:
            lost = until - self._next
            _log.error("kv_events_lost", missing=missing, lost=lost)
            # What was held before the hole is not known to be there: start from nothing.
            ours = self._translator.lost(lost)
        else:
            _log.warning("kv_events_replayed", missing=missing)
        return ours

    async def _replay(self, start: int) -> list[tuple[int, bytes]]:
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVTIMEO, REPLAY_TIMEOUT_MS)
            socket.connect(self._replay_endpoint)
            await socket.send_multipart([b"", start.to_bytes(8, "big")])
            batches: list[tuple[int, bytes]] = []
            while True:
                # Empty, topic (older versions leave it out), number, payload.
                frames = await socket.recv_multipart()
                number = int.from_bytes(frames[-2], "big")
                if number == END or not frames[-1]:
                    return batches
                batches.append((number, frames[-1]))
        except zmq.Again:
            _log.warning("kv_replay_unanswered", after_ms=REPLAY_TIMEOUT_MS)
            return []
        finally:
            socket.close()

    def _translate(self, payload: bytes) -> list[KvEvent]:
        try:
            return self._translator.translate(decode(payload))
        except (msgspec.DecodeError, ValueError, LookupError, TypeError, ArithmeticError) as error:
            _log.error("kv_events_unreadable", reason=repr(error))
            return self._translator.lost(1)

    def close(self) -> None:
        """Close the sockets."""
        self._context.destroy(linger=0)
