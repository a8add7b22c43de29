"""The admin port: who is let in, what is answered, and what a worker hears of it."""

import asyncio
from typing import Any

import msgspec
import pytest

from headwater.actors.admin import (
    BODY_BYTES_MAX,
    FAILURES_MAX,
    WINDOW_S,
    AdminApp,
    Token,
    TokenAuthenticator,
    WeakToken,
    parse_tokens,
)
from headwater.schemas.events import WorkerControlled
from tests.support.worlds.control import Worker, ready
from tests.support.worlds.virtual import Stage, events_of, staged

SECRET = "0123456789abcdef"
TOKENS = [Token("ops", SECRET), Token("ci", "f" * 32)]
BEARER = f"Bearer {SECRET}"


class Port:
    """Requests to the admin's application."""

    def __init__(self, worker: Worker) -> None:
        world = worker.asks
        self.app = AdminApp(world, TokenAuthenticator(TOKENS, world.clock))

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        token: str = BEARER,
        by: str = "",
        address: str = "10.0.0.1",
    ) -> tuple[int, Any, dict[bytes, bytes]]:
        """Status, document, headers."""
        data = body if isinstance(body, bytes) else b"" if body is None else msgspec.json.encode(body)
        headers = [(b"Authorization", token.encode())] if token else []
        headers += [(b"x-headwater-by", by.encode())] if by else []
        scope = {"type": "http", "path": path, "method": method, "headers": headers, "client": (address, 1)}
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": data, "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await self.app(scope, receive, send)
        start, *parts = sent
        document = msgspec.json.decode(b"".join(part["body"] for part in parts))
        return start["status"], document, dict(start["headers"])


@staged
async def test_workers_are_listed_and_controlled_and_the_audit_names_who_asked(stage: Stage) -> None:
    """The token's name, and what the header says of whoever uses it."""
    worker = await ready(stage)
    port = Port(worker)
    status, listed, headers = await port.ask("GET", "/admin/workers")
    assert status == 200
    assert [(one["worker"], one["state"], one["role"]) for one in listed["workers"]] == [
        ("w1", "ready", "both")
    ]
    assert headers[b"cache-control"] == b"no-store"
    assert not any(name.startswith(b"access-control") for name in headers)
    assert (await port.ask("GET", "/admin/workers/w1"))[1]["epoch"] == worker.actor.epoch
    status, done, _ = await port.ask("POST", "/admin/workers/w1/sleep", {"level": 2}, by="ann")
    assert (status, done["detail"]) == (200, "asleep at level 2")
    status, refused, _ = await port.ask("POST", "/admin/workers/w1/drain", token=f"bearer {'f' * 32}")
    assert status == 409
    assert refused["error"]["message"] == "sleeping: wake it first"
    await asyncio.sleep(0.1)
    records = await stage.records()
    audit = [(one.command, one.by, one.status) for one in events_of(records, WorkerControlled)]
    assert audit == [("sleep", "ann (token ops)", 200), ("drain", "token ci", 409)]


REFUSED: list[tuple[str, str, Any, int, str]] = [
    ("GET", "/", None, 404, "/admin/workers"),
    ("GET", "/admin/workersx", None, 404, "/admin/workers"),
    ("GET", "/admin/workers/w2", None, 404, "Workers: w1"),
    ("POST", "/admin/workers/w2/sleep", None, 404, "headwater ctl list"),
    ("POST", "/admin/workers/w1/explode", None, 404, "Commands: status, sleep"),
    ("POST", "/admin/workers/w1/sleep/now", None, 404, "WORKER/COMMAND"),
    ("POST", "/admin/workers", None, 405, "Use GET"),
    ("GET", "/admin/workers/w1/sleep", None, 405, "Use POST"),
    ("POST", "/admin/workers/w 1/sleep", None, 400, "is not a valid name"),
    ("POST", "/admin/workers/>/sleep", None, 400, "is not a valid name"),
    ("POST", "/admin/workers/w1/sleep", {"level": 9}, 400, "argument 'level'"),
    ("POST", "/admin/workers/w1/sleep", [1], 400, "JSON object"),
    ("POST", "/admin/workers/w1/sleep", b"{", 400, "JSON object"),
    ("POST", "/admin/workers/w1/load-lora", {"name": "a", "source": "b"}, 501, "'lora'"),
    ("POST", "/admin/workers/w1/sleep", b" " * (BODY_BYTES_MAX + 1), 413, "larger than"),
]


@pytest.mark.parametrize(("method", "path", "body", "status", "told"), REFUSED)
@staged
async def test_every_error_is_json_and_says_what_to_do(
    stage: Stage, method: str, path: str, body: Any, status: int, told: str
) -> None:
    """Whatever is asked: a status that fits and a message."""
    worker = await ready(stage)
    got, document, _ = await Port(worker).ask(method, path, body)
    assert got == status
    assert told in document["error"]["message"]
    assert worker.actor.status.state == "ready"


@pytest.mark.parametrize(
    "token",
    ["", "Bearer", "Bearer ", f"Bearer {SECRET[:-1]}", f"Bearer {SECRET}x", f"Basic {SECRET}", SECRET],
)
@staged
async def test_nobody_gets_in_without_a_token(stage: Stage, token: str) -> None:
    """Not even to hear what there is; only whether the process lives."""
    port = Port(await ready(stage))
    for method, path in (("GET", "/admin/workers"), ("GET", "/x"), ("POST", "/admin/workers/w1/stop")):
        status, document, headers = await port.ask(method, path, token=token)
        assert status == 401
        assert "Authorization: Bearer TOKEN" in document["error"]["message"]
        assert headers[b"www-authenticate"].startswith(b"Bearer")
    assert (await port.ask("GET", "/live", token=token))[0] == 200


@staged
async def test_an_address_that_guesses_is_not_listened_to_for_a_while(stage: Stage) -> None:
    """Not even with the right token: else guessing would go on. Others are not affected."""
    port = Port(await ready(stage))
    for _ in range(FAILURES_MAX):
        assert (await port.ask("GET", "/admin/workers", token="Bearer no"))[0] == 401
    status, document, headers = await port.ask("GET", "/admin/workers")
    assert status == 429
    assert "retry after" in document["error"]["message"]
    assert 1 <= int(headers[b"retry-after"]) <= WINDOW_S
    assert (await port.ask("GET", "/admin/workers", address="10.0.0.2"))[0] == 200
    stage.clock._now += WINDOW_S
    assert (await port.ask("GET", "/admin/workers"))[0] == 200


def test_tokens_in_a_file() -> None:
    """One a line, with a name or without; comments and empty lines are none."""
    assert parse_tokens(f"# ours\n\nops {SECRET}\n{'f' * 32}\n") == [
        Token("ops", SECRET),
        Token("admin", "f" * 32),
    ]


@pytest.mark.parametrize("text", ["", "# only this\n", "short\n", "ops short\n", f"a b {SECRET}\n", "ä" * 20])
def test_a_file_that_guards_nothing_is_refused(text: str) -> None:
    """The message says how to make a token."""
    with pytest.raises(WeakToken, match=r"token|TOKEN"):
        parse_tokens(text)
