"""Who may use the admin port: bearer tokens, and patience with those who guess."""

from collections import OrderedDict, deque
from hmac import compare_digest
from typing import NamedTuple

import structlog

from headwater.actors.edge.errors import ApiError
from headwater.actors.edge.http import Scope
from headwater.schemas.clock import Clock

TOKEN_CHARACTERS_MIN = 16
FAILURES_MAX = 10
WINDOW_S = 60.0
ADDRESSES_MAX = 4_096
"""Addresses remembered; the one whose failure is oldest is forgotten first."""

BY_MAX = 100

_log = structlog.get_logger("headwater.admin")


class WeakToken(ValueError):
    """A token that must not guard anything; the message says what to do."""


class Token(NamedTuple):
    """A secret and the name that it goes by in the audit."""

    name: str
    secret: str


def parse_tokens(text: str) -> list[Token]:
    """Tokens from a file: one a line, alone or behind a name (`NAME TOKEN`); a line that begins with # is a comment.

    Raises `WeakToken` for one that is too short, a line that is no token, and for a file without any.
    """
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) > 2:
            raise WeakToken(f"line {number}: write TOKEN or NAME TOKEN")
        name, secret = words if len(words) == 2 else ("admin", words[0])
        if len(secret) < TOKEN_CHARACTERS_MIN or not secret.isascii():
            raise WeakToken(
                f"line {number}: a token has at least {TOKEN_CHARACTERS_MIN} ASCII characters; "
                "`openssl rand -hex 32` makes a good one"
            )
        found.append(Token(name, secret))
    if not found:
        raise WeakToken("it holds no token; `openssl rand -hex 32` makes a good one")
    return found


class LogIns:
    """Admits who shows a token, and nobody from an address that failed `FAILURES_MAX` times in `WINDOW_S`."""

    def __init__(self, tokens: list[Token], clock: Clock) -> None:
        self._tokens = tokens
        self._clock = clock
        self._failures: OrderedDict[str, deque[float]] = OrderedDict()

    def admit(self, scope: Scope) -> str:
        """Who asks, for the audit: the token's name, with what X-Headwater-By says. Raises `ApiError` 401 or 429."""
        address = str((scope.get("client") or ("unknown", 0))[0])
        self._still_welcome(address)
        headers = {name.lower(): value for name, value in scope["headers"]}
        scheme, _, shown = headers.get(b"authorization", b"").strip().partition(b" ")
        known = None
        for one in self._tokens:
            # All of them, always: the time tells nothing about which was nearly right.
            if compare_digest(one.secret.encode(), shown.strip()) and scheme.lower() == b"bearer":
                known = one
        if known is None:
            self._note(address)
            raise ApiError(
                401,
                "Send the header Authorization: Bearer TOKEN, with a token of the --admin-token-file.",
                kind="authentication_error",
                code="unauthorized",
            )
        by = headers.get(b"x-headwater-by", b"").decode("latin-1").strip()[:BY_MAX]
        return f"{by} (token {known.name})" if by else f"token {known.name}"

    def _still_welcome(self, address: str) -> None:
        failures = self._failures.get(address)
        now = self._clock.monotonic_s()
        while failures and now - failures[0] >= WINDOW_S:
            failures.popleft()
        if failures is not None and not failures:
            del self._failures[address]
        elif failures is not None and len(failures) >= FAILURES_MAX:
            wait_s = WINDOW_S - (now - failures[0])
            raise ApiError(
                429,
                f"{len(failures)} failed log-ins from {address}: come back in {wait_s:.0f} s.",
                kind="rate_limit_error",
                code="too_many_log_ins",
                retry_after_s=max(1.0, wait_s),
            )

    def _note(self, address: str) -> None:
        failures = self._failures.setdefault(address, deque(maxlen=FAILURES_MAX))
        failures.append(self._clock.monotonic_s())
        self._failures.move_to_end(address)
        if len(self._failures) > ADDRESSES_MAX:
            self._failures.popitem(last=False)
        _log.warning("admin_log_in_failed", address=address, failures=len(failures))
