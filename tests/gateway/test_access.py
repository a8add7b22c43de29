"""Pickers with an NATS key of their own, in front of edges that authenticate their clients."""

from pathlib import Path

import pytest

from headwater.ops.nats import config as nats_config
from headwater.ops.nats.config import Wanted
from headwater.ops.start.sockets import free_port
from tests.gateway.stage import stage
from tests.support.servers.nats import NatsServer

pytestmark = [pytest.mark.processes, pytest.mark.soak, pytest.mark.timeout(180)]

CHAT = {"model": "sim", "messages": [{"role": "user", "content": "Where does a river begin? " * 20}]}


async def test_decisions_of_tenants_are_followed_and_nothing_is_denied(tmp_path: Path) -> None:
    """Picker and edge salt a tenant's blocks alike, else the edge would not follow; a request without a key gets the edge's 401."""
    port = free_port(0)
    nats_config.write(Wanted("default")._replace(port=port, store=str(tmp_path / "js")), tmp_path)
    nats = NatsServer(tmp_path, port=port, config=tmp_path / "nats.conf")
    await nats.start()
    access, auth = ("--nats-keys-dir", str(tmp_path)), ("--auth", "keys")
    try:
        async with stage(tmp_path, "--nats", nats.url, access=access, auth=auth) as made:
            code, output = await made.up.command("keys", "create", "--tenant", "acme")
            assert code == 0, output
            key = next(word for word in output.split() if word.startswith("hw-"))
            async with made.envoy.client(authorization=f"Bearer {key}") as client:
                for tokens in (4, 5):
                    answer = await client.post("/v1/chat/completions", json={**CHAT, "max_tokens": tokens})
                    assert answer.status_code == 200, answer.text
                assert int(answer.headers["x-headwater-cached-blocks"]) > 0
            async with made.envoy.client() as stranger:
                assert (await stranger.post("/v1/chat/completions", json=CHAT)).status_code == 401
            assert "pick_not_followed" not in made.up.log.read_text() + made.edge.log.read_text()
            logs = [picker.log.read_text() for picker in made.pickers]
            assert all("denied" not in log for log in logs)
            code, output = await made.up.command("explain", answer.headers["x-request-id"])
            assert code == 0, output
        assert nats.violations() == []
    finally:
        nats.stop()
