"""Plain requests over HTTP: that the scripted fleet answers what was recorded."""

import pytest

from tests.clients.answers import recorded
from tests.clients.conftest import MODEL
from tests.support.processes.fleet import FleetProcess

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.xdist_group("clients")]


async def test_an_answer_is_the_recorded_output(up: FleetProcess) -> None:
    async with up.client() as client:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
        response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    assert choice["message"]["content"].endswith(recorded()["no-call-thinking"]["expected"]["content"])
    assert choice["finish_reason"] == "stop"
