"""CORS: which origins are let in, preflights, and that every response has the headers."""

from typing import Any

import pytest

from headwater.actors.http.asgi import REQUEST_HEADERS_MAX, EventStream, allow_origins, check_origins, respond

ORIGIN = b"https://chat.example"


class Application:
    """Answers with an error or a stream; counts the requests that reach it."""

    def __init__(self) -> None:
        self.reached = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.reached += 1
        if scope["path"] == "/stream":
            stream = EventStream(send)
            await stream.start([(b"x-request-id", b"r")])
            stream.write(b"data: x\n\n", last=True)
        else:
            await respond(send, 429, b"{}", [(b"retry-after", b"1")])


async def ask(
    app: Any, path: str = "/", method: str = "POST", *headers: tuple[bytes, bytes]
) -> tuple[int, dict[bytes, bytes]]:
    """Status and headers of one response."""
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        raise AssertionError("nothing is read")

    await app({"type": "http", "path": path, "method": method, "headers": list(headers)}, receive, send)
    return sent[0]["status"], dict(sent[0]["headers"])


def preflight(origin: bytes, asked: bytes = b"authorization,content-type") -> list[tuple[bytes, bytes]]:
    """What a browser asks before a request with a key."""
    return [
        (b"origin", origin),
        (b"access-control-request-method", b"POST"),
        (b"access-control-request-headers", asked),
    ]


async def test_without_origins_nothing_is_added() -> None:
    """Not even a layer around the application."""
    app = Application()
    assert allow_origins(app, ()) is app


@pytest.mark.parametrize("path", ["/", "/stream"])
async def test_listed_origins_may_read_every_response(path: str) -> None:
    """Errors and streams, with the headers that clients need."""
    app = allow_origins(Application(), (ORIGIN.decode(), "https://other.example"))
    _, headers = await ask(app, path, "POST", (b"origin", ORIGIN))
    assert headers[b"access-control-allow-origin"] == ORIGIN
    assert headers[b"vary"] == b"origin"
    assert b"x-ratelimit-reset-tokens" in headers[b"access-control-expose-headers"]
    assert b"access-control-allow-credentials" not in headers


@pytest.mark.parametrize(
    "origin", [b"", b"null", b"https://chat.example.evil.example", b"http://chat.example", b"https://evil"]
)
async def test_other_origins_may_not(origin: bytes) -> None:
    """The response is the same, without the permission; a cache keeps the two apart."""
    app = allow_origins(Application(), (ORIGIN.decode(),))
    status, headers = await ask(app, "/", "POST", *([(b"origin", origin)] if origin else []))
    assert status == 429
    assert b"access-control-allow-origin" not in headers
    assert headers[b"vary"] == b"origin"
    _, headers = await ask(app, "/", "OPTIONS", *preflight(origin))
    assert b"access-control-allow-origin" not in headers


async def test_a_preflight_is_answered_before_the_application() -> None:
    """It comes without a key."""
    application = Application()
    app = allow_origins(application, (ORIGIN.decode(),))
    status, headers = await ask(
        app, "/v1/models", "OPTIONS", *preflight(ORIGIN, b"x-stainless-os, authorization")
    )
    assert status == 204
    assert headers[b"access-control-allow-origin"] == ORIGIN
    assert headers[b"access-control-allow-headers"] == b"x-stainless-os, authorization"
    assert b"POST" in headers[b"access-control-allow-methods"]
    assert application.reached == 0
    _, headers = await ask(app, "/", "OPTIONS", *preflight(ORIGIN, b"x" * (REQUEST_HEADERS_MAX + 1)))
    assert len(headers[b"access-control-allow-headers"]) < 100
    await ask(app, "/", "OPTIONS")
    assert application.reached == 1


async def test_every_origin_can_be_let_in() -> None:
    """Then no cache has to tell them apart."""
    _, headers = await ask(allow_origins(Application(), ("*",)), "/", "POST", (b"origin", b"https://any"))
    assert headers[b"access-control-allow-origin"] == b"*"
    assert b"vary" not in headers


@pytest.mark.parametrize("origin", ["chat.example", "https://chat.example/", "https://a b", "https://", ""])
def test_what_is_no_origin_is_refused(origin: str) -> None:
    """A browser would never send it."""
    check_origins(("*", "https://chat.example:8443", "tauri://localhost"))
    with pytest.raises(ValueError, match="is not an origin"):
        check_origins((origin,))
