"""The time limit of requests."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headwater.actors.edge.limits.limiter import NO_RETRY
from headwater.actors.http.errors import ApiError


@contextmanager
def time_limit(seconds: float, abort: Callable[[ApiError], None]) -> Iterator[None]:
    """Call `abort` with the error for the client if the block takes longer than `seconds`; 0: no limit."""
    if not seconds:
        yield
        return
    timer = asyncio.get_running_loop().call_later(seconds, lambda: abort(time_limit_reached(seconds)))
    try:
        yield
    finally:
        timer.cancel()


def time_limit_reached(seconds: float) -> ApiError:
    """504: the request took too long. A client that retried it would only make the same work again."""
    return ApiError(
        504,
        f"The request reached this server's time limit of {seconds:g} s. Lower max_tokens, or split the request.",
        kind="server_error",
        code="request_timeout",
        headers=NO_RETRY,
    )
