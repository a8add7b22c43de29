"""Restarting failed actors and processes with exponential backoff, up to a limit."""

from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import structlog

from headwater.schemas.clock import Clock

_log = structlog.get_logger("headwater.supervisor")


class RestartPolicy(NamedTuple):
    """At most `restarts_max` restarts within `window_s`; waits `delay_s`, doubling up to `delay_s_max`.

    A child that ran for `steady_s` starts again with `delay_s`. One that failed more often than that and is kept all the
    same waits `kept_delay_s`. One that fails to start waits up to as long; without a reason to keep it, it has `starts_max` tries.
    """

    restarts_max: int = 10
    window_s: float = 120.0
    delay_s: float = 0.2
    delay_s_max: float = 5.0
    steady_s: float = 20.0
    kept_delay_s: float = 30.0
    starts_max: int = 2


DEFAULT_POLICY = RestartPolicy()


class Unrecoverable(Exception):
    """Raised by a child that a restart cannot repair."""


class StartFailed(Exception):
    """Raised by a child that ended before it was ready. However long it took, that is no steady run; another start may succeed."""


class RestartLimitReached(Exception):
    """A child failed too often. The message contains its name and its last reason."""


class Backoff:
    """When to restart a child, and when to stop restarting it. Pure: time is an argument."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._failures: deque[float] = deque()
        self._delay_s = policy.delay_s
        self.starts_failed = 0
        """Starts that have failed since it last ran."""

    def next_start_s(self) -> float:
        """Seconds until the next start after one that failed: doubles up to `kept_delay_s`."""
        self.starts_failed += 1
        delay: float = self._policy.delay_s * 2 ** min(self.starts_failed - 1, 30)
        return min(delay, self._policy.kept_delay_s)

    def next_delay_s(self, now_s: float, ran_s: float) -> float | None:
        """Seconds until the next start after a failure at `now_s`; None once the limit is reached."""
        policy = self._policy
        self.starts_failed = 0
        if ran_s >= policy.steady_s:
            self._delay_s = policy.delay_s
        self._failures.append(now_s)
        while now_s - self._failures[0] > policy.window_s:
            self._failures.popleft()
        if len(self._failures) > policy.restarts_max:
            return None
        delay = self._delay_s
        self._delay_s = min(2 * delay, policy.delay_s_max)
        return delay


def _given_up() -> bool:
    return False


async def supervise(
    name: str,
    run: Callable[[], Awaitable[str]],
    clock: Clock,
    policy: RestartPolicy = DEFAULT_POLICY,
    *,
    is_kept: Callable[[], bool] = _given_up,
) -> None:
    """Run `run`, and again whenever it returns a reason or raises.

    Returns once `run` returns an empty reason, which means an intended end. Raises `RestartLimitReached`; `is_kept` is
    asked each time that the limit is reached, and prevents it. Nothing prevents it for an `Unrecoverable` child.
    """
    backoff = Backoff(policy)
    while True:
        started = clock.monotonic_s()
        try:
            reason = await run()
        except Unrecoverable as error:
            raise RestartLimitReached(f"{name}: {error}") from error
        except StartFailed as error:
            delay = backoff.next_start_s()
            if backoff.starts_failed >= policy.starts_max and not is_kept():
                raise RestartLimitReached(f"{name}: {error}") from error
            _log.warning("child_restarting", child=name, reason=str(error), delay_s=delay)
            await clock.sleep(delay)
            continue
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            _log.exception("child_failed", child=name)
        if not reason:
            return
        now = clock.monotonic_s()
        later = backoff.next_delay_s(now, now - started)
        delay = policy.kept_delay_s if later is None else later
        if later is None:
            often = f"{name} failed {policy.restarts_max + 1} times within {policy.window_s:.0f} s, last: {reason}"
            if not is_kept():
                raise RestartLimitReached(often)
            _log.error("child_restart_limit_exceeded", child=name, reason=often, delay_s=delay)
        _log.warning("child_restarting", child=name, reason=reason, delay_s=delay)
        await clock.sleep(delay)
