"""Permission violations: the server reports them out of band, and never replies to what it denied.

A denied request would wait for its deadline, look like a slow server, and be retried without end. Here the violation
ends the wait, and is logged once per subject.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from headwater.events.errors import AccessDenied, LogError

SUBJECTS_MAX = 1024
"""Bound on the subjects recorded as logged; beyond it one may be logged again."""

HINT = "give this process the key of its own kind, or its user this right (`headwater nats-config --help`)"

_VIOLATION = re.compile(r'permissions violation for (publish|subscription) to "([^"]*)"', re.IGNORECASE)

_RANDOM = re.compile(r"(?<=\.)c?[0-9A-Za-z]{22}(?=\.|$)")
"""Ids that nats-py and cursors generate: the same violation has another one each time."""

_log = structlog.get_logger("headwater.nats")


class Violations:
    """The violations of one connection."""

    def __init__(self, connection: str, inbox: str) -> None:
        self._connection = connection
        self._inbox = inbox
        self._inbox_denied = False
        self._logged: set[tuple[str, str]] = set()
        self._waiting: dict[str, set[asyncio.Timeout]] = {}

    def note(self, error: Exception) -> bool:
        """Record an error of the server; False if it is not a permission violation."""
        match = _VIOLATION.search(str(error))
        if match is None:
            return False
        # nats-py converts the text to lower case.
        action, subject = match[1].lower(), match[2].lower()
        self._log_once(action, _RANDOM.sub("*", subject))
        if action == "publish":
            self._end(subject)
        elif subject.startswith(self._inbox.lower() + "."):
            # No reply can be received: end all waits.
            self._inbox_denied = True
            for key in list(self._waiting):
                self._end(key)
        return True

    def reconnected(self) -> None:
        """Forget violations of subscriptions: after a reconnect permissions may differ."""
        self._inbox_denied = False

    def _end(self, key: str) -> None:
        now = asyncio.get_running_loop().time()
        for scope in self._waiting.pop(key, ()):
            scope.reschedule(now)

    def _reason(self, subject: str) -> str:
        what = f"receiving replies on {self._inbox}.>" if self._inbox_denied else subject
        return f"the server denies {what} to {self._connection!r}; {HINT}"

    def _log_once(self, action: str, subject: str) -> None:
        if (action, subject) in self._logged:
            return
        if len(self._logged) >= SUBJECTS_MAX:
            self._logged.clear()
        self._logged.add((action, subject))
        _log.error(
            "nats_permission_denied",
            action=action,
            subject=subject,
            connection=self._connection,
            hint=HINT,
        )

    @asynccontextmanager
    async def watch(self, subject: str) -> AsyncIterator[None]:
        """Around a request on `subject`: raises `AccessDenied` as soon as the server denies it."""
        if self._inbox_denied:
            raise AccessDenied(self._reason(subject))
        key = subject.lower()
        scope = asyncio.timeout(None)
        self._waiting.setdefault(key, set()).add(scope)
        try:
            async with scope:
                yield
        except (TimeoutError, LogError):
            # The request's own deadline is raised, and a reply received before any violation is returned.
            if scope.expired():
                raise AccessDenied(self._reason(subject)) from None
            raise
        finally:
            waiting = self._waiting.get(key)
            if waiting is not None:
                waiting.discard(scope)
                if not waiting:
                    del self._waiting[key]
