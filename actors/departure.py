"""What a worker says when it must end: everything at once, none of it waiting for another, and none of it for long.

Its requests are given up (the edges move them), its lease is given back (nobody waits for it to lapse), and the log
hears the reason. Where NATS can not be reached nothing of it is told here: then the lease lapses, a router tells
the log, and the edges ask and get no answer.
"""

import asyncio
from collections.abc import Awaitable

import structlog

from headwater.actors.frames import FrameSender
from headwater.actors.lease import LeaseHandle
from headwater.actors.worker_life import WorkerLife
from headwater.engines.engine import Step

TELL_S_MAX = 1.5
LEAVE_S_MAX = 2.0

_log = structlog.get_logger("headwater.worker")


async def depart(frames: FrameSender, held: LeaseHandle | None, life: WorkerLife | None, reason: str) -> None:
    """Tell everybody that this worker is gone. Returns within `TELL_S_MAX` and never raises."""
    requests = list(frames.active)
    _log.error("worker_falls", reason=reason, requests=len(requests))
    for request in requests:
        frames.step(request, Step((), "error", detail=reason))
    telling: dict[str, Awaitable[None]] = {"frames": frames.flush()}
    if held is not None:
        telling["lease"] = held.release()
    if life is not None:
        telling["log"] = life.fallen(reason)
    await asyncio.gather(*(_told(what, work) for what, work in telling.items()))


async def leave(frames: FrameSender, life: WorkerLife) -> None:
    """Go in peace: what was sent arrives, the log knows, and the lease is back. Returns within about `LEAVE_S_MAX`."""
    try:
        async with asyncio.timeout(LEAVE_S_MAX):
            await frames.flush()
            await life.leave()
    except TimeoutError:
        _log.warning("left_without_telling", what="log", after_s=LEAVE_S_MAX)
        await life.lease.release()


async def _told(what: str, work: Awaitable[None]) -> None:
    try:
        async with asyncio.timeout(TELL_S_MAX):
            await work
    except TimeoutError:
        _log.warning("left_without_telling", what=what, after_s=TELL_S_MAX)
    except Exception as error:
        _log.warning("left_without_telling", what=what, reason=f"{type(error).__name__}: {error}")


def why(error: BaseException) -> str:
    """An error in a line; of several, those inside."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(why(one) for one in error.exceptions)
    return f"{type(error).__name__}: {error}"
