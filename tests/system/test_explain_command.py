"""`headwater explain` against a server whose logs a router could have written."""

import json
from typing import Any

import pytest

from headwater.ops.config.sections import NatsSettings
from headwater.ops.config.setting import ConfigError
from headwater.ops.nats.server import open_ports
from headwater.ops.operator.explain import explain
from headwater.schemas.clock import SystemClock
from tests.bench.large_log import POOL, MadeUpFleet, write
from tests.support.servers.nats import NatsServer

EVENTS = 6_000


async def test_a_request_is_explained_as_text_and_as_json(
    server: NatsServer, unique: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same decision and the same events; one that is not there ends with 1."""
    fleet = MadeUpFleet(unique, SystemClock())
    async with open_ports(server.url, unique, "test") as ports:
        log: Any = await ports.pool_log(POOL)
        await write(log._client, fleet, EVENTS, print)
    nats = NatsSettings(server.url, namespace=unique)
    request = fleet.requests[len(fleet.requests) // 2]
    capsys.readouterr()
    assert await explain(nats, "", request) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{request}-0-1: ")
    assert "  req.ended: reason stop" in shown
    assert await explain(nats, "", request, every=True, as_json=True) == 0
    data = json.loads(capsys.readouterr().out)
    [one] = data["decisions"]
    assert f"decided at log position {one['decision']['position']}, stored at {one['position']}" in shown
    assert [event["event"] for event in data["events"]][-1] == "req.ended"
    assert await explain(nats, "", "chatcmpl-other") == 1
    assert "no decision for chatcmpl-other in this log" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="REQUEST is empty"):
        await explain(nats, "", " ")
