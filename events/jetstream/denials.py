"""Permission violations: the server tells them out of band, and never answers what it denied.

So a denied request would wait for its deadline, look like a slow server, and be tried again for ever. Here the
violation ends the wait, and is logged once per subject.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from headwater.events.errors import AccessDenied, LogError

SUBJECTS_MAX = 1024
"""Subjects that are remembered as told; past it they may be told again."""

MEND = "give this process the key of its own kind, or its user this right (`headwater nats-config --help`)"

_VIOLATION = re.compile(r'permissions violation for (publish|subscription) to "([^"]*)"', re.IGNORECASE)

_RANDOM = re.compile(r"(?<=\.)c?[0-9A-Za-z]{22}(?=\.|$)")
"""Ids that nats-py and cursors make: the same denial has another one each time."""

_log = structlog.get_logger("headwater.nats")


class Denials:
    """The violations of one connection."""

    def __init__(self, connection: str, inbox: str) -> None:
        self._connection = connection
        self._inbox = inbox
        self._deaf = False
        self._told: set[tuple[str, str]] = set()
        self._waiting: dict[str, set[asyncio.Timeout]] = {}

    def note(self, error: Exception) -> bool:
        """Take in an error of the server; False if it is no permission violation."""
        match = _VIOLATION.search(str(error))
        if match is None:
            return False
        # nats-py brings the text in lower case.
        action, subject = match[1].lower(), match[2].lower()
        self._tell(action, _RANDOM.sub("*", subject))
        if action == "publish":
            self._end(subject)
        elif subject.startswith(self._inbox.lower() + "."):
            # No answer can ever come: whatever is waited for, it is in vain.
            self._deaf = True
            for key in list(self._waiting):
                self._end(key)
        return True

    def reconnected(self) -> None:
        """Subscriptions are made anew: rights may be others now."""
        self._deaf = False

    def _end(self, key: str) -> None:
        now = asyncio.get_running_loop().time()
        for scope in self._waiting.pop(key, ()):
            scope.reschedule(now)

    def _reason(self, subject: str) -> str:
        what = f"receiving answers on {self._inbox}.>" if self._deaf else subject
        return f"the server denies {what} to {self._connection!r}; {MEND}"

    def _tell(self, action: str, subject: str) -> None:
        if (action, subject) in self._told:
            return
        if len(self._told) >= SUBJECTS_MAX:
            self._told.clear()
        self._told.add((action, subject))
        _log.error(
            "nats_permission_denied",
            action=action,
            subject=subject,
            connection=self._connection,
            mend=MEND,
        )

    @asynccontextmanager
    async def watch(self, subject: str) -> AsyncIterator[None]:
        """Around a request on `subject`: raises `AccessDenied` as soon as the server denies it."""
        if self._deaf:
            raise AccessDenied(self._reason(subject))
        key = subject.lower()
        scope = asyncio.timeout(None)
        self._waiting.setdefault(key, set()).add(scope)
        try:
            async with scope:
                yield
        except (TimeoutError, LogError):
            # The request's own deadline passes through, and so does an answer that came with no denial before it.
            if scope.expired():
                raise AccessDenied(self._reason(subject)) from None
            raise
        finally:
            waiting = self._waiting.get(key)
            if waiting is not None:
                waiting.discard(scope)
                if not waiting:
                    del self._waiting[key]
