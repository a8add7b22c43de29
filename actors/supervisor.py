"""Restarting what dies: with backoff, and loudly giving up. Used for actors and for processes alike."""

from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import structlog

from headwater.schemas.clock import Clock

_log = structlog.get_logger("headwater.supervisor")


class RestartPolicy(NamedTuple):
    """At most `restarts_max` restarts within `window_s`; waits `delay_s`, doubling up to `delay_s_max`.

    Having run for `steady_s` resets the delay.
    """

    restarts_max: int = 10
    window_s: float = 120.0
    delay_s: float = 0.2
    delay_s_max: float = 5.0
    steady_s: float = 20.0


DEFAULT_POLICY = RestartPolicy()


class Hopeless(Exception):
    """Raised by a child for which starting again can not help."""


class GaveUp(Exception):
    """A child died too often. The message names it and its last reason."""


class Backoff:
    """The pure part: when to restart, and when to give up."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._deaths: deque[float] = deque()
        self._delay_s = policy.delay_s

    def next_delay_s(self, now_s: float, ran_s: float) -> float | None:
        """Seconds to wait before the next start after a death at `now_s`; None: give up."""
        policy = self._policy
        if ran_s >= policy.steady_s:
            self._delay_s = policy.delay_s
        self._deaths.append(now_s)
        while now_s - self._deaths[0] > policy.window_s:
            self._deaths.popleft()
        if len(self._deaths) > policy.restarts_max:
            return None
        delay = self._delay_s
        self._delay_s = min(2 * delay, policy.delay_s_max)
        return delay


async def supervise(
    name: str,
    run: Callable[[], Awaitable[str]],
    clock: Clock,
    policy: RestartPolicy = DEFAULT_POLICY,
) -> None:
    """Run `run` for ever, starting it again whenever it returns a reason or raises.

    An empty reason is a wanted end, and ends the supervision. Raises `GaveUp`.
    """
    backoff = Backoff(policy)
    while True:
        started = clock.monotonic_s()
        try:
            reason = await run()
        except Hopeless as error:
            raise GaveUp(f"{name}: {error}") from error
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            _log.exception("child_failed", child=name)
        if not reason:
            return
        now = clock.monotonic_s()
        delay = backoff.next_delay_s(now, now - started)
        if delay is None:
            raise GaveUp(
                f"{name} died {policy.restarts_max + 1} times within {policy.window_s:.0f} s, last: {reason}"
            )
        _log.warning("child_restarts", child=name, reason=reason, delay_s=delay)
        await clock.sleep(delay)
