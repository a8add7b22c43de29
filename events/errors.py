"""Errors of the log, by what the caller can do about them.

    LogError
    ├── LogUnavailable   retryable: the server did not answer in time, or has no leader
    │   └── LogFull      retryable once an operator made room: the store's limit or the disk is reached
    ├── LogRefused       not retryable: the server said no; the message carries its reason
    │   └── AccessDenied not retryable: the server does not know us, or we may not do this
    └── StreamMissing    not retryable: the stream was deleted or never created

Losing a fence is not an error: `Log.append` returns `Fenced`.
"""


class LogError(Exception):
    """Base. `retryable` tells whether the same call may succeed later."""

    retryable = False


class LogUnavailable(LogError):
    """No answer in time, no leader, or no connection."""

    retryable = True


class LogFull(LogUnavailable):
    """There is no room in the store. Nothing was stored; the message says which limit."""


class LogRefused(LogError):
    """The server answered with an error. `code` is NATS's err_code."""

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class AccessDenied(LogRefused):
    """The server refuses this client, or what it asked for; the message names the setting and the mend."""


class StreamMissing(LogError):
    """The stream does not exist."""
