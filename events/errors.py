"""Errors of the log, by what the caller can do about them.

    LogError
    ├── LogUnavailable   retryable: the server did not answer in time, or has no leader
    │   └── LogFull      retryable once an operator freed space: the store's limit or the disk is reached
    ├── LogRefused       not retryable: the server rejected the request; the message contains its reason
    │   └── AccessDenied not retryable: authentication failed, or the client lacks a permission
    └── StreamMissing    not retryable: the stream was deleted or never created

Losing a fence is not an error: `Log.append` returns `Fenced`.
"""


class LogError(Exception):
    """Base. `retryable`: the same call may succeed later."""

    retryable = False


class LogUnavailable(LogError):
    """No answer in time, no leader, or no connection."""

    retryable = True


class LogFull(LogUnavailable):
    """The store is full. Nothing was stored; the message names the limit."""


class LogRefused(LogError):
    """The server answered with an error. `code` is NATS's err_code."""

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class AccessDenied(LogRefused):
    """The server rejects this client, or what it requested; the message names the setting and the fix."""


class StreamMissing(LogError):
    """The stream does not exist."""
