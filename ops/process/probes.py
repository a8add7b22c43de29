"""/live and /health of a process, answered by the thread of its metrics port: not even a busy event loop delays them.

The event loop hands over a copy of its state every `BEAT_S`. That shows two things: what the state is, and that the loop
runs. A copy that is too old means that the loop does not run.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec

BEAT_S: Final = 0.25

HEALTH_STALE_S: Final = 3.0
"""/health fails when the event loop has not run for so long: requests sent here would wait."""

Health = Callable[[], tuple[bool, dict[str, Any]]]
"""Whether clients should be sent here, and what /health says about it."""


class Beat(NamedTuple):
    """State of the event loop at a time of the monotonic clock."""

    at_s: float
    healthy: bool
    body: bytes


class ProbeBoard:
    """Where the event loop writes its state and the thread reads it: one reference, replaced as a whole.

    `live_timeout_s`: /live fails when the loop has not run for so long, so that an orchestrator restarts the process.
    """

    def __init__(self, live_timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._live_timeout_s = live_timeout_s
        self._clock = clock
        self._beat = Beat(clock(), False, msgspec.json.encode({"status": "starting"}))

    def beat(self, health: Health | None) -> None:
        """The event loop runs, and this is its state; None while no actor runs."""
        healthy, document = health() if health is not None else (False, {"status": "restarting"})
        self._beat = Beat(self._clock(), healthy, msgspec.json.encode(document))

    def live(self) -> tuple[int, bytes]:
        """Status and body of /live: whether the event loop runs."""
        silent_s = self._clock() - self._beat.at_s
        if silent_s > self._live_timeout_s:
            return 503, _stuck(silent_s)
        return 200, msgspec.json.encode({"status": "live"})

    def health(self) -> tuple[int, bytes]:
        """Status and body of /health: whether clients should be sent here."""
        beat = self._beat
        silent_s = self._clock() - beat.at_s
        if silent_s > HEALTH_STALE_S:
            return 503, _stuck(silent_s)
        return 200 if beat.healthy else 503, beat.body

    async def keep_beating(self, health: Callable[[], Health | None]) -> None:
        """Beat until cancelled; `health` returns what to ask now."""
        while True:
            self.beat(health())
            await asyncio.sleep(BEAT_S)


def _stuck(silent_s: float) -> bytes:
    return msgspec.json.encode({"status": "event loop does not run", "silent_s": round(silent_s, 1)})
