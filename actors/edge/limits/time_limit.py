"""The time limit of requests."""

import asyncio
from collections.abc import Callable

from headwater.actors.http.errors import NO_RETRY, ApiError


class TimeLimit:
    """A block that calls `abort` with the error for the client once it takes longer than `seconds`; 0: no limit."""

    __slots__ = ("_abort", "_seconds", "_timer")

    def __init__(self, seconds: float, abort: Callable[[ApiError], None]) -> None:
        self._seconds = seconds
        self._abort = abort
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        if self._seconds:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._end)

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _end(self) -> None:
        self._abort(time_limit_reached(self._seconds))


def time_limit_reached(seconds: float) -> ApiError:
    """504: the request took too long. A client that retried it would only make the same work again."""
    return ApiError(
        504,
        f"The request reached this server's time limit of {seconds:g} s. Lower max_tokens, or split the request.",
        kind="server_error",
        code="request_timeout",
        headers=NO_RETRY,
    )
