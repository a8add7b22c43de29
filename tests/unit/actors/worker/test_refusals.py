"""Commands that are refused: wrong arguments, the wrong state, what an engine can not, and who is in the way."""

import asyncio
from typing import Any

import msgspec
import pytest

from headwater.actors.worker.control import send_command
from headwater.engines.sim.engine import SimEngine
from headwater.ops.sim.fleet import NAMESPACE
from headwater.schemas import subjects
from headwater.schemas.control import COMMANDS, Command, ControlReply, ControlRequest
from tests.support.data.control_records import audited
from tests.support.engines.controlled import ControlledSim
from tests.support.worlds.control import Worker, ready
from tests.support.worlds.virtual import Stage, staged


@staged
async def test_one_command_at_a_time(stage: Stage) -> None:
    """A second is refused with what runs; a look is not; resume ends a drain that waits."""
    worker = await ready(stage)
    await worker.given(1, 1_400)
    drain = asyncio.ensure_future(worker.told("drain"))
    await asyncio.sleep(0.01)
    second = await worker.told("clear-kv")
    assert (second.status, second.data) == (409, {"busy": "drain"})
    assert (await worker.told("status")).data["busy"] == "drain"
    resumed = await worker.told("resume")
    assert resumed == ControlReply(200, "ready")
    assert (await drain).status == 409
    assert worker.actor.status.state == "ready"
    assert len(worker.actor.inflight) == 1
    assert [(one.command, one.status) for one in await audited(stage)] == [
        ("clear-kv", 409),
        ("drain", 409),
        ("resume", 200),
    ]


@staged
async def test_nobody_there_is_told_as_such(stage: Stage) -> None:
    """404 for a worker that does not exist; the client does not wait for it."""
    worker = await ready(stage)
    reply = await send_command(worker.asks, "w9", ControlRequest("status"))
    assert reply.status == 404
    assert "headwater ctl list" in reply.detail


@pytest.mark.parametrize(
    ("command", "arguments", "told"),
    [
        ("sleep", {"level": 3}, "argument 'level'"),
        ("sleep", {"levels": 1}, "there is no argument 'levels'; it takes level, within_s"),
        ("pause", {"mode": "maybe"}, "argument 'mode'"),
        ("pause", {"within_s": -1}, "argument 'within_s'"),
        ("role", {}, "argument 'role' is missing"),
        ("role", {"role": "boss"}, "argument 'role'"),
        ("load-lora", {"name": "a"}, "argument 'source' is missing"),
        ("wake", {"level": 1}, "there is no argument 'level'; it takes none"),
    ],
)
@staged
async def test_wrong_arguments_are_named(
    stage: Stage, command: Command, arguments: dict[str, Any], told: str
) -> None:
    """400, nothing is done, and the audit has it."""
    worker = await ready(stage)
    reply = await worker.told(command, **arguments)
    assert reply.status == 400
    assert f"{command}: {told}" in reply.detail
    assert worker.actor.status.state == "ready"
    assert [one.status for one in await audited(stage)] == [400]


@staged
async def test_what_is_no_command_is_refused(stage: Stage) -> None:
    """Bytes from anywhere."""
    worker = await ready(stage)
    for data in (b"", b"\xc1", msgspec.msgpack.encode(["explode", {}, "me"])):
        answer = await worker.asks.bus.request(subjects.control(NAMESPACE, "w1"), data, timeout_s=2.0)
        assert msgspec.msgpack.decode(answer, type=ControlReply).status == 400


class Plain(ControlledSim):
    """Can nothing that is optional."""

    capabilities = SimEngine.capabilities - {"clear_kv", "sleep", "pause", "handoff", "lora"}


@pytest.mark.parametrize(
    ("command", "arguments", "capability"),
    [
        ("sleep", {}, "sleep"),
        ("wake", {}, "sleep"),
        ("pause", {}, "pause"),
        ("clear-kv", {}, "clear_kv"),
        ("profile-start", {}, "profile"),
        ("role", {"role": "prefill"}, "handoff"),
        ("load-lora", {"name": "a", "source": "b"}, "lora"),
        ("unload-lora", {"name": "a"}, "lora"),
        ("list-loras", {}, "lora"),
    ],
)
@staged
async def test_what_an_engine_can_not_is_refused_by_name(
    stage: Stage, command: Command, arguments: dict[str, Any], capability: str
) -> None:
    """501, before anything was drained for it."""
    worker = await ready(stage, make=Plain)
    await worker.given(1, 1_000)
    reply = await worker.told(command, **arguments)
    assert (reply.status, reply.data) == (501, {"capability": capability})
    assert len(worker.actor.inflight) == 1


WRONG_STATE: list[tuple[Command, Command, int]] = [
    ("drain", "wake", 409),
    ("pause", "wake", 409),
    ("pause", "drain", 409),
    ("pause", "sleep", 409),
    ("pause", "pause", 200),
    ("sleep", "drain", 409),
    ("sleep", "resume", 409),
    ("sleep", "pause", 409),
    ("sleep", "clear-kv", 409),
    ("sleep", "sleep", 200),
    ("drain", "sleep", 200),
    ("drain", "pause", 200),
    ("drain", "drain", 200),
]


@pytest.mark.parametrize(("first", "second", "status"), WRONG_STATE)
@staged
async def test_each_state_takes_what_makes_sense_in_it(
    stage: Stage, first: Command, second: Command, status: int
) -> None:
    """The table in `actors/worker/control_commands.py`."""
    worker = await ready(stage)
    assert (await worker.told(first)).status == 200
    assert (await worker.told(second)).status == status


@staged
async def test_every_command_is_there(stage: Stage) -> None:
    """What the schema lists, the worker does."""
    worker: Worker = await ready(stage)
    assert set(worker.actor.control._commands._all) == set(COMMANDS)
