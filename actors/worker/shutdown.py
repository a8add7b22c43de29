"""The end of a worker: what it sends to edges, the lease table and the pool log, within a bounded time.

A failed worker sends everything at once, so that no part waits for another: its requests end with an error (the edges
migrate them), its lease is released (so that no reader waits for it to lapse), and the log gets the reason. If NATS is
unreachable none of this arrives: then the lease lapses, a router publishes that, and the edges query in vain.
"""

import asyncio
from collections.abc import Awaitable

import structlog

from headwater.actors.runtime.lease import LeaseHandle
from headwater.actors.worker.lifecycle.incarnation import Incarnation
from headwater.actors.worker.serving.requests import RequestIntake
from headwater.actors.worker.serving.token_frames import FrameSender

FAILURE_NOTICE_S_MAX = 1.5
LEAVE_S_MAX = 2.0

_log = structlog.get_logger("headwater.worker")


async def shutdown_after_failure(
    intake: RequestIntake, held: LeaseHandle | None, incarnation: Incarnation | None, reason: str
) -> None:
    """Publish that this worker has failed. Returns within `FAILURE_NOTICE_S_MAX` and never raises."""
    requests = intake.fail_all(reason)
    _log.error("worker_failed", reason=reason, requests=requests)
    notices: dict[str, Awaitable[None]] = {"frames": intake.frames.flush()}
    if held is not None:
        notices["lease"] = held.release()
    if incarnation is not None:
        notices["log"] = incarnation.publish_failure(reason)
    await asyncio.gather(*(_send_notice(what, notice) for what, notice in notices.items()))


async def shutdown_after_drain(frames: FrameSender, incarnation: Incarnation) -> None:
    """Leave the pool: frames are flushed, the log is written, the lease is released. Takes about `LEAVE_S_MAX` at most."""
    try:
        async with asyncio.timeout(LEAVE_S_MAX):
            await frames.flush()
            await incarnation.leave()
    except TimeoutError:
        _log.warning("shutdown_notice_failed", what="log", after_s=LEAVE_S_MAX)
        await incarnation.lease.release()


async def _send_notice(what: str, notice: Awaitable[None]) -> None:
    try:
        async with asyncio.timeout(FAILURE_NOTICE_S_MAX):
            await notice
    except TimeoutError:
        _log.warning("shutdown_notice_failed", what=what, after_s=FAILURE_NOTICE_S_MAX)
    except Exception as error:
        _log.warning("shutdown_notice_failed", what=what, reason=f"{type(error).__name__}: {error}")


def describe_failure(error: BaseException) -> str:
    """An error in one line; of an exception group, those inside."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(describe_failure(one) for one in error.exceptions)
    return f"{type(error).__name__}: {error}"
