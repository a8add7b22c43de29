"""Commands that outlast a question, a life or the worker itself, and the adapters that commands load."""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from headwater.actors.worker.control import ANSWER_S, send_command
from headwater.engines.engine import EngineError
from headwater.engines.lora_cache import LoraError
from headwater.schemas import subjects
from headwater.schemas.control import ControlReply, ControlRequest
from headwater.schemas.events import WorkerLeft
from tests.support.data.control_records import audited, folded
from tests.support.worlds.control import ready, start
from tests.support.worlds.virtual import Stage, another_takes_the_lease, events_of, staged, until


@staged
async def test_a_command_that_takes_long_is_followed_to_its_end(stage: Stage) -> None:
    """The server lets a worker answer for a minute only: 202 with a ticket, and the client asks on."""
    worker = await ready(stage)
    worker.engine.no_sleep.clear()
    stage.clock.call_later(ANSWER_S + 60.0, worker.engine.no_sleep.set)
    first = asyncio.ensure_future(worker.told("sleep"))
    reply = await first
    assert (reply.status, list(reply.data)) == (202, ["ticket"])
    assert (await worker.told("status")).data["ticket"] == reply.data["ticket"]
    await until(lambda: worker.actor.status.state == "sleeping", 200.0)
    await worker.told("wake")
    worker.engine.no_sleep.clear()
    began = stage.clock.time()
    stage.clock.call_later(ANSWER_S + 60.0, worker.engine.no_sleep.set)
    followed = await send_command(worker.asks, "w1", ControlRequest("sleep", {"level": 2}, "me"))
    assert followed == ControlReply(200, "asleep at level 2", {"migrated": 0})
    assert ANSWER_S + 60.0 <= stage.clock.time() - began < ANSWER_S + 62.0


@staged
async def test_stop_drains_leaves_and_ends_without_an_error(stage: Stage) -> None:
    """The answer comes first, the audit is in the log, and what runs has the time that was given."""
    worker = await ready(stage)
    await worker.given(1, 1_400)
    reply = await worker.told("stop", within_s=0.5)
    assert reply.status == 200
    took = await until(lambda: worker.ended is not None, 5.0)
    assert 0.4 < took < 1.5
    assert worker.ended == ""
    assert [one.command for one in await audited(stage)] == ["stop"]
    assert events_of(await stage.records(), WorkerLeft)[-1].reason == "stopped"
    assert await stage.fleet.store.leases.get(subjects.lease_key("worker", "w1")) is None


class Taken(EngineError):
    """An error that says what it is."""

    status = 409


class Books:
    """Adapters of a worker, as `actors/worker/lora.py` has them."""

    def __init__(self) -> None:
        self.held: dict[str, str] = {}

    async def load(self, name: str, source: str) -> None:
        if name == "bad":
            raise ValueError("its rank is 128, the engine takes 16")
        if name == "taken":
            raise Taken("all slots are taken")
        if name == "broken":
            raise EngineError("out of memory")
        self.held[name] = source

    async def unload(self, name: str, *, forget: bool = False) -> None:
        self.forgotten = forget
        if name not in self.held:
            raise LoraError(404, f"no adapter {name} is loaded")
        del self.held[name]

    async def list(self) -> Sequence[dict[str, Any]]:
        return [{"name": name} for name in self.held]


@staged
async def test_adapters_are_loaded_by_who_knows_how_and_their_secrets_are_not_logged(stage: Stage) -> None:
    """Errors become statuses; a signed URL stays out of the audit."""
    books = Books()
    worker = await ready(stage, lora=books)
    source = "https://me:pw@host/a.zip?X-Amz-Signature=123"
    assert (await worker.told("load-lora", name="a", source=source)).status == 200
    assert books.held == {"a": source}
    assert (await worker.told("list-loras")).data == {"loras": [{"name": "a"}]}
    assert (await worker.told("load-lora", name="bad", source="b")).status == 400
    assert (await worker.told("load-lora", name="broken", source="b")).status == 502
    missing = await worker.told("unload-lora", name="z")
    assert (missing.status, missing.detail) == (404, "unload-lora: no adapter z is loaded")
    assert (await worker.told("unload-lora", name="a", forget=True)).status == 200
    assert books.forgotten
    taken = await worker.told("load-lora", name="taken", source="b")
    assert (taken.status, taken.detail) == (409, "load-lora: all slots are taken")
    first = (await audited(stage))[0]
    assert msgspec.json.decode(first.arguments) == {"name": "a", "source": "https://host/a.zip"}


@staged
async def test_what_was_done_between_two_lives_is_in_the_audit_of_the_next(stage: Stage) -> None:
    """The lease is lost under a sleep: its end is told in the next life, which begins as what it became."""
    worker = await ready(stage)
    first = worker.actor.epoch
    worker.engine.no_sleep.clear()
    sleeping = asyncio.ensure_future(worker.told("sleep"))
    await asyncio.sleep(0.5)
    process = stage.fleet.processes["w1"]
    process.cut()
    await asyncio.sleep(4.0)
    worker.engine.no_sleep.set()
    await asyncio.sleep(0.5)
    await another_takes_the_lease(stage, "w1")
    process.heal()
    await until(lambda: worker.actor.incarnation is not None and worker.actor.epoch > first)
    sleeping.cancel()
    told = await audited(stage)
    assert [(one.command, one.status, one.epoch > first) for one in told] == [("sleep", 200, True)]
    assert (await folded(stage)).loads.workers["w1"].state == "sleeping"


@staged
async def test_a_worker_is_ready_while_an_incarnation_of_it_has_joined(stage: Stage) -> None:
    """What a rollout waits for: routers may choose it. Not while it has lost its lease, though its engine runs, and not while it drains."""
    worker = await start(stage)
    assert worker.actor.readiness() == (False, {"status": "starting"})
    await until(worker.actor.ready.is_set, within_s=200.0)
    ready, document = worker.actor.readiness()
    assert ready
    first = worker.actor.epoch
    assert (document["status"], document["state"], document["epoch"]) == ("ok", "ready", first)
    process = stage.fleet.processes["w1"]
    process.cut()
    await asyncio.sleep(4.0)
    await another_takes_the_lease(stage, "w1")
    process.heal()
    await until(lambda: worker.actor.readiness() == (False, {"status": "rejoining"}))
    await until(lambda: worker.actor.readiness()[0])
    assert worker.actor.readiness()[1]["epoch"] > first
    worker.actor.stop()
    await until(lambda: worker.actor.readiness()[1]["status"] == "draining")
    assert not worker.actor.readiness()[0]
