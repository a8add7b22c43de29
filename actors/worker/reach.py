"""Whether this host reaches the address at which another worker's engine hands its KV over.

Engines do not ask: vLLM waits five seconds for an answer from an address that leads nowhere, for each prompt anew, and a decode leg of SGLang
five minutes. A connection tells within two seconds, once for all prompts of the next half minute, and the refusal says what to change.
"""

import asyncio
import contextlib
import os
from collections import OrderedDict
from typing import Final

from headwater.schemas.addresses import is_loopback, split_host_port
from headwater.schemas.clock import Clock

CONNECT_S: Final = 2.0

GOOD_S: Final = 30.0
"""A place that was reached is not tried again for so long."""

BAD_S: Final = 5.0
"""The same for one that was not: its host may be back."""

PLACES_MAX: Final = 1024
"""Places remembered; the one not asked for longest is forgotten first."""


class Reach:
    """The places that were tried from here, and what came of it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._tried: OrderedDict[str, tuple[float, str]] = OrderedDict()

    async def refusal(self, worker: str, place: str) -> str:
        """Why the place (`host:port`) of a worker's KV cannot be reached, and what to do; empty where it can, and for no place."""
        if not place:
            return ""
        until_s, reason = self._tried.get(place, (0.0, ""))
        if self._clock.monotonic_s() >= until_s:
            reason = await _attempt(place)
            self._tried[place] = (self._clock.monotonic_s() + (BAD_S if reason else GOOD_S), reason)
        self._tried.move_to_end(place)
        if len(self._tried) > PLACES_MAX:
            self._tried.popitem(last=False)
        if not reason:
            return ""
        return (
            f"worker {worker} hands its KV over at {place}, which this host does not reach ({reason}): start that worker with "
            "--handoff-host and an address of its host that the others reach, and let them through its firewall"
        )


async def _attempt(place: str) -> str:
    """Connect once; why it failed, or empty."""
    host, port = split_host_port(place)
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return f"no answer within {CONNECT_S:.0f} s"
    except OSError as error:
        # asyncio's own text repeats the address; errors of names have numbers of their own.
        reason = (os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)).lower()
        return f"{reason}; it is a loopback address" if is_loopback(host) else reason
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return ""
