"""Authentication of the admin port: bearer tokens, and a limit on failed attempts per address."""

from collections import OrderedDict, deque
from hmac import compare_digest
from typing import NamedTuple

import structlog

from headwater.actors.http.asgi import Scope
from headwater.actors.http.errors import ApiError
from headwater.schemas.clock import Clock

TOKEN_CHARACTERS_MIN = 16
FAILURES_MAX = 10
WINDOW_S = 60.0
ADDRESSES_MAX = 4_096
"""Addresses tracked; the one whose last failure is oldest is dropped first."""

BY_MAX = 100

_log = structlog.get_logger("headwater.admin")


class WeakToken(ValueError):
    """A token file that is not secure enough; the message says what to do."""


class Token(NamedTuple):
    """A secret, and its name in the audit."""

    name: str
    secret: str


def parse_tokens(text: str) -> list[Token]:
    """Tokens from a file: one per line, alone or after a name (`NAME TOKEN`); lines that start with # are comments.

    Raises `WeakToken` for a token that is too short, a malformed line, or a file without tokens.
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
                "generate one with `openssl rand -hex 32`"
            )
        found.append(Token(name, secret))
    if not found:
        raise WeakToken("it contains no token; generate one with `openssl rand -hex 32`")
    return found


class TokenAuthenticator:
    """Accepts requests with a valid token, and none from an address that failed `FAILURES_MAX` times in `WINDOW_S`."""

    def __init__(self, tokens: list[Token], clock: Clock) -> None:
        self._tokens = tokens
        self._clock = clock
        self._failures: OrderedDict[str, deque[float]] = OrderedDict()

    def authenticate(self, scope: Scope) -> str:
        """The client, for the audit: the token's name and the header X-Headwater-By. Raises `ApiError` 401 or 429."""
        address = str((scope.get("client") or ("unknown", 0))[0])
        self._check_failures(address)
        headers = {name.lower(): value for name, value in scope["headers"]}
        scheme, _, shown = headers.get(b"authorization", b"").strip().partition(b" ")
        known = None
        for one in self._tokens:
            # Always all of them: the response time must not depend on which token matched.
            if compare_digest(one.secret.encode(), shown.strip()) and scheme.lower() == b"bearer":
                known = one
        if known is None:
            self._record_failure(address)
            raise ApiError(
                401,
                "Send the header Authorization: Bearer TOKEN, with a token of the --admin-token-file.",
                kind="authentication_error",
                code="unauthorized",
            )
        by = headers.get(b"x-headwater-by", b"").decode("latin-1").strip()[:BY_MAX]
        return f"{by} (token {known.name})" if by else f"token {known.name}"

    def _check_failures(self, address: str) -> None:
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
                f"Too many failed attempts from {address} ({len(failures)}); retry after {wait_s:.0f} s.",
                kind="rate_limit_error",
                code="too_many_failed_attempts",
                retry_after_s=max(1.0, wait_s),
            )

    def _record_failure(self, address: str) -> None:
        failures = self._failures.setdefault(address, deque(maxlen=FAILURES_MAX))
        failures.append(self._clock.monotonic_s())
        self._failures.move_to_end(address)
        if len(self._failures) > ADDRESSES_MAX:
            self._failures.popitem(last=False)
        _log.warning("admin_authentication_failed", address=address, failures=len(failures))
