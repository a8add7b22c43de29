"""Authentication of WebSockets: at the handshake, and again for each request of the connection."""

import asyncio
import json
from typing import Any, Final

from headwater.actors.edge.settings import AccessSettings
from headwater.ops.operator.keys import WantedKey
from tests.support.worlds.edge import EdgeWorld

CREATE: Final = {
    "type": "response.create",
    "model": "m",
    "input": "hi",
    "max_output_tokens": 16,
    "store": False,
}


class Connection:
    """A client's side of one WebSocket, on the application itself."""

    def __init__(self, edge: EdgeWorld, key: str) -> None:
        self.sent: list[dict[str, Any]] = []
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._incoming.put_nowait({"type": "websocket.connect"})
        headers = [(b"authorization", b"Bearer " + key.encode())] if key else []
        scope = {"type": "websocket", "path": "/v1/responses", "headers": headers, "subprotocols": []}
        self.task = asyncio.ensure_future(edge.app(scope, self._incoming.get, self._send))

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    async def ask(self) -> dict[str, Any]:
        """Send one request; returns the last event of its answer."""
        self._incoming.put_nowait({"type": "websocket.receive", "text": json.dumps(CREATE)})
        async with asyncio.timeout(20):
            while True:
                for message in self.sent:
                    event: dict[str, Any] = json.loads(message.get("text") or message.get("bytes") or "{}")
                    if event.get("type") in ("response.completed", "response.incomplete", "error"):
                        self.sent.clear()
                        return event
                await asyncio.sleep(0)

    async def close(self) -> None:
        """Disconnect."""
        self._incoming.put_nowait({"type": "websocket.disconnect", "code": 1000})
        await self.task


def test_a_handshake_without_a_valid_key_is_refused() -> None:
    with EdgeWorld(access=AccessSettings("keys")) as edge:

        async def refused(key: str) -> list[dict[str, Any]]:
            connection = Connection(edge, key)
            async with asyncio.timeout(20):
                await connection.task
            return connection.sent

        limited = edge.create_key(WantedKey("acme", endpoints=("chat",)))
        for key, status in (("", 401), ("hw-0123456789ab-" + "0" * 64, 401), (limited, 403)):
            start = edge.runner.run(refused(key))[0]
            assert start["type"] == "websocket.http.response.start"
            assert start["status"] == status


def test_a_key_that_is_revoked_ends_an_open_connections_requests() -> None:
    with EdgeWorld(access=AccessSettings("keys")) as edge:
        key = edge.create_key(WantedKey("acme"))

        async def use() -> tuple[dict[str, Any], dict[str, Any]]:
            connection = Connection(edge, key)
            before = await connection.ask()
            await edge.world.api_keys.delete(key.split("-")[1])
            for _ in range(3):
                await asyncio.sleep(0)
            after = await connection.ask()
            await connection.close()
            return before, after

        before, after = edge.runner.run(use())
        assert before["type"] in ("response.completed", "response.incomplete"), before
        assert after["type"] == "error"
        assert after["error"]["code"] == "invalid_api_key"
        assert key not in json.dumps(after)
