"""Two engines behind one model of a real fleet: an operator moves its requests from one to the other and back."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import msgspec
import pytest

from headwater.actors.worker.actor import WorkerActor
from headwater.engines.sim.engine import SimEngine
from headwater.ops.config.processes import EngineProcess
from headwater.ops.config.worker import WorkerSettings
from headwater.ops.nats.server import open_ports
from headwater.ops.start import plan
from headwater.schemas.clock import SystemClock
from tests.support.processes.fleet import FleetProcess, fleet

pytestmark = [pytest.mark.processes]

BODY = {"model": "sim", "prompt": "Where does a river begin?", "max_tokens": 4, "temperature": 0}


class OtherEngine(SimEngine):
    """The simulated engine under another name."""

    name = "other"


@contextlib.asynccontextmanager
async def other_worker(up: FleetProcess) -> AsyncIterator[None]:
    """A worker of the other engine, in the test's own process, that has joined the fleet's pool."""
    made, served = plan.make_engine(EngineProcess(worker=WorkerSettings(engine="sim")), "other-0")
    assert isinstance(made, SimEngine)
    async with open_ports(up.nats, "default", "other-0", kind="worker") as ports:
        engine = OtherEngine(made._settings, SystemClock())
        actor = WorkerActor(ports, "other-0", engine, served, drain_s=2.0)
        life = asyncio.create_task(actor.run())
        try:
            async with asyncio.timeout(20):
                await actor.ready.wait()
            await up.until_whole()
            yield
        finally:
            actor.stop()
            async with asyncio.timeout(20):
                await life


async def served_by(
    client: httpx.AsyncClient, count: int = 12, headers: dict[str, str] | None = None
) -> Counter[str]:
    """The workers of so many requests, all of which succeed."""
    answers = await asyncio.gather(
        *(client.post("/v1/completions", json=BODY, headers=headers) for _ in range(count))
    )
    assert [one.status_code for one in answers] == [200] * count, [one.text for one in answers]
    return Counter(one.headers["x-headwater-worker"].partition(".")[0] for one in answers)


async def command(up: FleetProcess, *words: str, code: int = 0) -> str:
    """What a command prints."""
    status, text = await up.command(*words)
    assert status == code, text
    return text


async def test_requests_move_between_engines_as_weights_say(tmp_path: Path) -> None:
    """Show, set, switch, refuse what makes no sense, explain, replay; the restarted router still has the weights."""
    flags = (
        "--engine",
        "sim",
        "--workers",
        "1",
        "--client-policies",
        "kv,direct",
        "--record-payloads",
        "full",
    )
    async with fleet(tmp_path, *flags) as up, other_worker(up), up.client() as client:
        assert "not set" in await command(up, "ctl", "weights", "sim")
        text = await command(up, "ctl", "weights", "sim", "sim=0", "other=1")
        assert "100.0%" in text
        assert await served_by(client) == {"other-0": 12}
        assert await served_by(client, headers={"x-headwater-engine": "sim"}) == {"worker-0": 12}
        # A session keeps its engine.
        await command(up, "ctl", "weights", "sim", "sim=1", "other=1")
        for number in range(3):
            assert len(await served_by(client, 6, {"x-headwater-session": f"s{number}"})) == 1
        text = await command(up, "ctl", "weights", "sim", "vllm=1", code=1)
        assert "no worker of this pool runs engine 'vllm'; its engines are: other, sim (status 400)" in text
        text = await command(up, "ctl", "weights", "nothing", "sim=1", code=2)
        assert "there is no model 'nothing'; models are: sim" in text
        await command(up, "ctl", "weights", "sim", "sim=1", "other=0")
        up.kill(" router ")
        assert await served_by(client) == {"worker-0": 12}
        answer = await client.post("/v1/completions", json=BODY)
        text = await command(up, "explain", answer.headers["x-request-id"])
        assert "engine sim: drawn by weights other=0 sim=1, seed" in text
        text = await command(up, "replay", "--verify")
        assert ": equal" in text
        assert "weights" in await command(up, "log", "--audit")
        await command(up, "ctl", "weights", "sim", "remove")
        text = await command(up, "compare", "sim", "--url", up.url, "--max-tokens", "3", "--json")
        document = msgspec.json.decode(text.splitlines()[-1])
        assert [(one["engine"], one["failed"]) for one in document["engines"]] == [("other", 0), ("sim", 0)]
        assert document["compared"] == len(document["prompts"]) == 1
        assert document["prompts"][0]["tokens"] == [3, 3]
        assert "not set" in await command(up, "ctl", "weights", "sim")
