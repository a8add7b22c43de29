"""An issuer's keys over HTTP, from a server that rotates them, fails, and answers with what are no keys."""

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import jwt
import pytest

from headwater.actors.edge.admit import oidc
from headwater.actors.edge.admit.oidc import SigningKeys, TokenVerifier, read_url
from headwater.actors.http.errors import ApiError
from tests.support.worlds.clock import ManualClock, running, settle
from tests.unit.actors.edge.admit.test_oidc import EC, ED, ISSUER, SETTINGS, document, jwk

NEW: Any = EC
OLD: Any = ED


class Issuer:
    """A JWKS endpoint: its answer can be changed, and how often it was asked."""

    def __init__(self) -> None:
        self.status = 200
        self.body = document(jwk(OLD, "old", "EdDSA"))
        self.headers: dict[str, str] = {}
        self.asked = 0
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                issuer.asked += 1
                self.send_response(issuer.status)
                for name, value in issuer.headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(issuer.body)))
                self.end_headers()
                self.wfile.write(issuer.body)

            def log_message(self, *_: object) -> None:
                """Nothing on the test's output."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/keys"
        self.clock = ManualClock()
        self.keys = SigningKeys(read_url(self.url), self.clock, rotates=True)
        self.verifier = TokenVerifier(SETTINGS, self.keys, self.clock)

    def close(self) -> None:
        """Refuse connections from now on."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def token(self, private: Any, key_id: str, algorithm: str, **claims: Any) -> bytes:
        """A token that is valid for ten minutes."""
        until = self.clock.wall_ns() // 1_000_000_000 + 600
        required = {"iss": ISSUER, "aud": "headwater", "sub": "u1", "tenant": "acme", "exp": until}
        return jwt.encode(required | claims, private, algorithm, headers={"kid": key_id}).encode()

    async def accepts(self, token: bytes) -> bool:
        """Whether a token is accepted."""
        try:
            return (await self.verifier.verify(token)).tenant == "acme"
        except ApiError as error:
            if error.status != 401:
                raise
            return False


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    made = Issuer()
    try:
        yield made
    finally:
        if made._thread.is_alive():
            made.close()


async def test_keys_rotate(issuer: Issuer) -> None:
    """Old and new side by side, then the new one alone: no token of a published key is refused, none of another's accepted."""
    old = issuer.token(OLD, "old", "EdDSA")
    assert await issuer.accepts(old)
    assert issuer.asked == 1
    issuer.body = document(jwk(OLD, "old", "EdDSA"), jwk(NEW, "new", "ES256"))
    await issuer.clock.advance(oidc.REFRESH_S_MIN)
    assert await issuer.accepts(issuer.token(NEW, "new", "ES256"))
    assert await issuer.accepts(issuer.token(OLD, "old", "EdDSA", sub="u2"))
    assert issuer.asked == 2
    issuer.body = document(jwk(NEW, "new", "ES256"))
    # A known key is not asked for again: that it is gone shows at the hourly reading.
    async with running(issuer.keys.run()):
        await settle()
        await issuer.clock.advance(oidc.REFRESH_S)
        while issuer.asked < 3 or issuer.keys._reading is not None:
            await settle()
    await issuer.clock.advance(oidc.REMEMBERED_S)
    assert not await issuer.accepts(issuer.token(OLD, "old", "EdDSA", sub="u3"))
    assert await issuer.accepts(issuer.token(NEW, "new", "ES256", sub="u3"))


@pytest.mark.parametrize(
    ("status", "body", "headers"),
    [
        (500, b"out of order", {}),
        (404, b"", {}),
        (200, b"<html>", {}),
        (200, b'{"keys": []}', {}),
        (200, b" " * (oidc.BYTES_MAX + 1), {}),
        (302, b"", {"location": "http://evil.example/keys"}),
        (302, b"", {"location": "file:///etc/passwd"}),
    ],
)
async def test_what_are_no_keys_replaces_none(
    issuer: Issuer, status: int, body: bytes, headers: dict[str, str]
) -> None:
    assert await issuer.accepts(issuer.token(OLD, "old", "EdDSA"))
    issuer.status, issuer.body, issuer.headers = status, body, headers
    await issuer.clock.advance(oidc.REFRESH_S_MIN)
    assert not await issuer.accepts(issuer.token(NEW, "new", "ES256"))
    assert issuer.asked == 2
    assert await issuer.accepts(issuer.token(OLD, "old", "EdDSA", sub="u2"))


async def test_keys_outlive_their_server(issuer: Issuer) -> None:
    assert await issuer.accepts(issuer.token(OLD, "old", "EdDSA"))
    issuer.close()
    await issuer.clock.advance(oidc.REFRESH_S_MIN)
    assert not await issuer.accepts(issuer.token(NEW, "new", "ES256"))
    assert await issuer.accepts(issuer.token(OLD, "old", "EdDSA", sub="u2"))


async def test_a_redirect_to_where_keys_may_be_is_followed(issuer: Issuer) -> None:
    other = Issuer()
    try:
        issuer.status, issuer.headers = 302, {"location": other.url}
        assert await issuer.accepts(issuer.token(OLD, "old", "EdDSA"))
        assert (issuer.asked, other.asked) == (1, 1)
    finally:
        other.close()
