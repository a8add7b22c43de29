"""The real clock."""

import asyncio
import time


class SystemClock:
    """Wall and monotonic time of this machine; see `headwater.schemas.clock.Clock`."""

    def wall_ns(self) -> int:
        """Nanoseconds since the Unix epoch."""
        return time.time_ns()

    def monotonic_s(self) -> float:
        """Seconds on a clock that never goes back."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Suspend the calling task."""
        await asyncio.sleep(seconds)
