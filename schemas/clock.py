"""Time as an argument: actors, engines and the log read the clock that they are given, never one of their own."""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """A source of time. `SystemClock` is the real one; tests and the simulator pass a virtual one."""

    def wall_ns(self) -> int:
        """Nanoseconds since the Unix epoch. Data only: never used to measure a duration."""
        ...

    def monotonic_s(self) -> float:
        """Seconds on a clock that never goes back. For timeouts, leases and rates."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Suspend for `seconds`; zero yields to other tasks once."""
        ...


class SystemClock:
    """Wall and monotonic time of this machine; see `Clock`."""

    def wall_ns(self) -> int:
        """Nanoseconds since the Unix epoch."""
        return time.time_ns()

    def monotonic_s(self) -> float:
        """Seconds on a clock that never goes back."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Suspend the calling task."""
        await asyncio.sleep(seconds)
