"""Control commands on a virtual clock: each state, each refusal, what the log hears, and who may interrupt whom."""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from headwater.actors.control import ANSWER_S
from headwater.actors.control_client import control
from headwater.engines.engine import EngineError
from headwater.engines.sim import SimEngine
from headwater.ops.sim.fleet import NAMESPACE
from headwater.router.state import RouterState
from headwater.schemas import subjects
from headwater.schemas.control import COMMANDS, Command, ControlReply, ControlRequest
from headwater.schemas.fleet import WorkerChanged, WorkerControlled, WorkerJoined, WorkerLeft
from headwater.schemas.inference import Accepted, Embedded, Refused
from headwater.schemas.kv import BlocksCleared, BlocksStored
from tests.support.controlled import ControlledSim
from tests.unit.control_world import Worker, ready
from tests.unit.examples import packed
from tests.unit.virtual import Stage, events_of, play, until


async def folded(stage: Stage) -> RouterState:
    """What a router knows."""
    state = RouterState()
    for one in await stage.records():
        assert state.apply(one) is None
    return state


async def audited(stage: Stage) -> list[WorkerControlled]:
    """The audit, once everything is written."""
    await asyncio.sleep(0.1)
    return events_of(await stage.records(), WorkerControlled)


async def states(stage: Stage) -> list[tuple[str, str]]:
    """How the worker stood, one after the other."""
    await asyncio.sleep(0.1)
    return [(one.state, one.role) for one in events_of(await stage.records(), WorkerChanged)]


def test_status_tells_all_of_it_and_is_not_in_the_audit() -> None:
    """State, role, load, adapters, epoch, how long it lives, and what runs."""

    async def run(stage: Stage) -> None:
        worker = await ready(stage)
        await worker.given(1)
        await asyncio.sleep(0.5)
        reply = await worker.told("status")
        assert (reply.status, reply.detail) == (200, "ready")
        data = reply.data
        assert (data["worker"], data["role"], data["state"]) == ("w1", "both", "ready")
        assert (data["requests"], data["load"]["running"], data["epoch"]) == (1, 1, worker.actor.epoch)
        assert (data["loras"], data["busy"], data["last"]) == ([], "", {})
        assert data["uptime_s"] >= 0.5
        assert await audited(stage) == []

    play(run)


def test_sleep_lets_what_runs_end_then_gives_everything_back() -> None:
    """Nothing new is taken, what runs ends, the log hears every state and that the cache is empty."""

    async def run(stage: Stage) -> None:
        worker = await ready(stage)
        await worker.given(1, 20)
        sleeping = asyncio.ensure_future(worker.told("sleep", by="ann@box", level=2, within_s=60))
        await asyncio.sleep(0.02)
        refused = await worker.given(2)
        assert refused == Refused("worker w1 is draining", True)
        reply = await sleeping
        assert reply == ControlReply(200, "asleep at level 2", {"moved": 0})
        assert worker.engine.calls == ["clear-kv", "clear-kv", "sleep 2"], "the first after its canary"
        assert await worker.given(3) == Refused("worker w1 is sleeping", True)
        assert await states(stage) == [("ready", "both"), ("draining", "both"), ("sleeping", "both")]
        state = await folded(stage)
        assert state.index.blocks.get("w1", 0) == 0
        assert not state.loads.workers["w1"].takes_requests
        woken = await worker.told("wake", by="ann@box")
        assert woken == ControlReply(200, "awake")
        assert isinstance(await worker.given(4, 2), Accepted)
        assert (await states(stage))[-1] == ("ready", "both")
        assert [(one.command, one.by, one.status) for one in await audited(stage)] == [
            ("sleep", "ann@box", 200),
            ("wake", "ann@box", 200),
        ]
        assert msgspec.json.decode((await audited(stage))[0].arguments) == {"level": 2, "within_s": 60}

    play(run)


def test_what_does_not_end_in_time_is_given_up() -> None:
    """Sleep aborts it: the edge moves it. It does not wait for ever, and does not sleep over it."""

    async def run(stage: Stage) -> None:
        worker = await ready(stage)
        await worker.given(1, 1_500)
        began = stage.clock.time()
        reply = await worker.told("sleep", within_s=0.5)
        assert reply == ControlReply(200, "asleep at level 1", {"moved": 1})
        assert 0.5 <= stage.clock.time() - began < 1.0
        entry = (await worker.status_of(1)).entry
        assert entry is not None
        assert entry.finish == "abort"

    play(run)


def test_kv_that_is_kept_for_others_keeps_a_worker_awake_until_it_is_given_up() -> None:
    """A drain waits for it as for a request; sleep gives it back to the engine when time is over."""

    async def run(stage: Stage) -> None:
        worker = await ready(stage)
        assert isinstance(await worker.given(1, 4, leg="prefill"), Accepted)
        await until(lambda: worker.actor.work.handoffs == 1)
        refused = await worker.told("role", role="decode")
        assert (refused.status, refused.detail) == (
            409,
            "0 requests run, 1 hand-offs are held: drain it first",
        )
        began = stage.clock.time()
        assert (await worker.told("sleep", within_s=0.5)).status == 200
        assert stage.clock.time() - began >= 0.5
        assert worker.engine.released == ["r1-0-1"]
        assert worker.actor.work.handoffs == 0

    play(run)


def test_prompts_that_are_pooled_are_work_like_any_other() -> None:
    """Sleep waits for them, then gives them up and says so: their edge would wait for two minutes."""

    async def run(stage: Stage) -> None:
        worker = await ready(stage)
        pooled = asyncio.ensure_future(worker.pooled("e1"))
        await until(lambda: len(worker.actor.work) == 1)
        assert (await worker.told("status")).data["requests"] == 1
        began = stage.clock.time()
        assert (await worker.told("sleep", within_s=2.0)).data == {"moved": 1}
        assert await pooled == Refused("the worker gave it up", True)
        assert 2.0 <= stage.clock.time() - began < 2.5
        await worker.told("wake")
        worker.engine.embed_s = 20.0
        pooled = asyncio.ensure_future(worker.pooled("e2"))
        await asyncio.sleep(0.1)
        assert (await worker.told("drain")).data == {"moved": 0}
        assert isinstance(await pooled, Embedded)

    play(run)


def test_blocks_are_gone_from_the_log_even_if_the_engine_keeps_them_in_its_books() -> None:
    """An engine that says nothing when it sleeps: no router may send a prompt after blocks that are no more."""

    async def run(stage: Stage) -> None:
        worker = await ready(stage)
        await worker.given(1, 2)
        worker.engine.books = [BlocksStored(0, packed(7, 8, 9))]
        await asyncio.sleep(0.5)
        before = len(events_of(await stage.records(), BlocksCleared))
        assert (await folded(stage)).index.blocks["w1"] > 0
        await worker.told("sleep")
        await asyncio.sleep(0.1)
        assert (await folded(stage)).index.blocks["w1"] == 0
        assert len(events_of(await stage.records(), BlocksCleared)) > before
        # Asked to tell all anew while it sleeps, it still has nothing.
        await worker.asks.bus.request(subjects.resync(NAMESPACE, "w1"), b"", timeout_s=2.0)
        await asyncio.sleep(0.1)
        assert (await folded(stage)).index.blocks["w1"] == 0

    play(run)


@pytest.mark.parametrize(
    ("call", "command", "arguments", "first"),
    [
        ("sleep 1", "sleep", {}, None),
        ("wake", "wake", {}, "sleep"),
        ("pause keep", "pause", {"mode": "keep"}, None),
        ("resume", "resume", {}, "pause"),
        ("profile True", "profile-start", {}, None),
        ("clear-kv", "clear-kv", {}, None),
    ],
)
def test_an_engine_that_fails_leaves_the_worker_as_it_was(
    call: str, command: Command, arguments: dict[str, Any], first: Command | None
) -> None:
    """502 with the engine's words, in the audit as well; and the same command works later."""

    async def run(stage: Stage) -> None:
        worker = await ready(stage)
        if first is not None:
            assert (await worker.told(first)).status == 200
        before = worker.actor.standing
        worker.engine.fails = {call}
        reply = await worker.told(command, **arguments)
        assert (reply.status, reply.detail) == (502, f"{command}: no {call} today")
        assert worker.actor.standing == before
        assert (await audited(stage))[-1].status == 502
        worker.engine.fails = set()
        assert (await worker.told(command, **arguments)).status == 200

    play(run)


def test_requests_kept_over_a_pause_are_not_lost() -> None:
    """An edge that wonders hears that the worker knows them; behind the pause they end with all their tokens."""

    async def run(stage: Stage) -> None:
        worker = await ready(stage)
        await worker.given(1, 50)
        await asyncio.sleep(0.05)
        reply = await worker.told("pause", mode="keep")
        assert reply == ControlReply(200, "paused, 1 requests kept", {"moved": 0, "kept": 1})
        assert await worker.given(2) == Refused("worker w1 is paused", True)
        await asyncio.sleep(900.0)
        status = await worker.status_of(1)
        assert status.known
        assert status.entry is not None
        tokens = len(status.entry.tokens)
        assert 0 < tokens < 50
        assert status.entry.finish == ""
        assert worker.ended is None, "silent for long, and rightly so"
        assert (await worker.told("resume")).detail == "ready"
        await until(lambda: not len(worker.actor.work))
        done = (await worker.status_of(1)).entry
        assert done is not None
        assert (len(done.tokens), done.finish) == (50, "length")

    play(run)


@pytest.mark.parametrize(
    ("mode", "within_s", "moved"), [("abort", 30.0, 1), ("wait", 0.2, 1), ("wait", 60.0, 0)]
)
def test_a_pause_without_keeping_leaves_nothing_running(mode: str, within_s: float, moved: int) -> None:
    """Aborted at once, or after a while, or not at all as it ended in time."""

    async def run(stage: Stage) -> None:
        worker = await ready(stage)
        await worker.given(1, 200)
        reply = await worker.told("pause", mode=mode, within_s=within_s)
        assert (reply.status, reply.data) == (200, {"moved": moved, "kept": 0})
        assert len(worker.actor.work) == 0

    play(run)


def test_a_drained_worker_stays_and_may_change_its_role() -> None:
    """Same lease, same epoch, one joining in the log; the role only once nothing runs."""

    async def run(stage: Stage) -> None:
        worker = await ready(stage)
        epoch = worker.actor.epoch
        await worker.given(1, 100)
        busy = await worker.told("role", role="prefill")
        assert (busy.status, busy.detail) == (409, "1 requests run, 0 hand-offs are held: drain it first")
        drained = await worker.told("drain")
        assert drained.status == 200
        assert len(worker.actor.work) == 0
        assert (await worker.told("role", role="decode")).data == {"state": "draining"}
        assert (await worker.told("status")).data["role"] == "decode"
        assert (await worker.told("resume")).status == 200
        assert await states(stage) == [
            ("ready", "both"),
            ("draining", "both"),
            ("draining", "decode"),
            ("ready", "decode"),
        ]
        known = (await folded(stage)).loads.workers["w1"]
        assert (known.epoch, known.role, known.takes_requests) == (epoch, "decode", True)
        assert len(events_of(await stage.records(), WorkerJoined)) == 1
        assert events_of(await stage.records(), WorkerLeft) == []

    play(run)


def test_one_command_at_a_time() -> None:
    """A second is refused with what runs; a look is not; resume ends a drain that waits."""

    async def run(stage: Stage) -> None:
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
        assert worker.actor.standing.state == "ready"
        assert len(worker.actor.work) == 1
        assert [(one.command, one.status) for one in await audited(stage)] == [
            ("clear-kv", 409),
            ("drain", 409),
            ("resume", 200),
        ]

    play(run)


def test_a_command_that_takes_long_is_followed_to_its_end() -> None:
    """The server lets a worker answer for a minute only: 202 with a ticket, and the client asks on."""

    async def run(stage: Stage) -> None:
        worker = await ready(stage)
        worker.engine.no_sleep.clear()
        stage.clock.call_later(ANSWER_S + 60.0, worker.engine.no_sleep.set)
        first = asyncio.ensure_future(worker.told("sleep"))
        reply = await first
        assert (reply.status, list(reply.data)) == (202, ["ticket"])
        assert (await worker.told("status")).data["ticket"] == reply.data["ticket"]
        await until(lambda: worker.actor.standing.state == "sleeping", 200.0)
        await worker.told("wake")
        worker.engine.no_sleep.clear()
        began = stage.clock.time()
        stage.clock.call_later(ANSWER_S + 60.0, worker.engine.no_sleep.set)
        followed = await control(worker.asks, "w1", ControlRequest("sleep", {"level": 2}, "me"))
        assert followed == ControlReply(200, "asleep at level 2", {"moved": 0})
        assert ANSWER_S + 60.0 <= stage.clock.time() - began < ANSWER_S + 62.0

    play(run)


def test_nobody_there_is_told_as_such() -> None:
    """404 for a worker that does not exist; the client does not wait for it."""

    async def run(stage: Stage) -> None:
        worker = await ready(stage)
        reply = await control(worker.asks, "w9", ControlRequest("status"))
        assert reply.status == 404
        assert "headwater ctl list" in reply.detail

    play(run)


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
def test_wrong_arguments_are_named(command: Command, arguments: dict[str, Any], told: str) -> None:
    """400, nothing is done, and the audit has it."""

    async def run(stage: Stage) -> None:
        worker = await ready(stage)
        reply = await worker.told(command, **arguments)
        assert reply.status == 400
        assert f"{command}: {told}" in reply.detail
        assert worker.actor.standing.state == "ready"
        assert [one.status for one in await audited(stage)] == [400]

    play(run)


def test_what_is_no_command_is_refused() -> None:
    """Bytes from anywhere."""

    async def run(stage: Stage) -> None:
        worker = await ready(stage)
        for data in (b"", b"\xc1", msgspec.msgpack.encode(["explode", {}, "me"])):
            answer = await worker.asks.bus.request(subjects.control(NAMESPACE, "w1"), data, timeout_s=2.0)
            assert msgspec.msgpack.decode(answer, type=ControlReply).status == 400

    play(run)


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
def test_what_an_engine_can_not_is_refused_by_name(
    command: Command, arguments: dict[str, Any], capability: str
) -> None:
    """501, before anything was drained for it."""

    async def run(stage: Stage) -> None:
        worker = await ready(stage, make=Plain)
        await worker.given(1, 1_000)
        reply = await worker.told(command, **arguments)
        assert (reply.status, reply.data) == (501, {"capability": capability})
        assert len(worker.actor.work) == 1

    play(run)


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
def test_each_state_takes_what_makes_sense_in_it(first: Command, second: Command, status: int) -> None:
    """The table in `actors/control_commands.py`."""

    async def run(stage: Stage) -> None:
        worker = await ready(stage)
        assert (await worker.told(first)).status == 200
        assert (await worker.told(second)).status == status

    play(run)


def test_stop_drains_leaves_and_ends_without_an_error() -> None:
    """The answer comes first, the audit is in the log, and what runs has the time that was given."""

    async def run(stage: Stage) -> None:
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

    play(run)


class Taken(EngineError):
    """An error that says what it is."""

    status = 409


class Books:
    """Adapters of a worker, as `actors/adapters.py` has them."""

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
            raise LookupError(f"no adapter {name} is loaded")
        del self.held[name]

    async def list(self) -> Sequence[dict[str, Any]]:
        return [{"name": name} for name in self.held]


def test_adapters_are_loaded_by_who_knows_how_and_their_secrets_are_not_logged() -> None:
    """Errors become statuses; a signed URL stays out of the audit."""

    async def run(stage: Stage) -> None:
        books = Books()
        worker = await ready(stage, adapters=books)
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

    play(run)


def test_what_was_done_between_two_lives_is_in_the_audit_of_the_next() -> None:
    """The lease lapses under a sleep: its end is told in the next life, which begins as what it became."""

    async def run(stage: Stage) -> None:
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
        process.heal()
        await until(lambda: worker.actor.life is not None and worker.actor.epoch > first)
        sleeping.cancel()
        told = await audited(stage)
        assert [(one.command, one.status, one.epoch > first) for one in told] == [("sleep", 200, True)]
        assert (await folded(stage)).loads.workers["w1"].state == "sleeping"

    play(run)


def test_every_command_is_there() -> None:
    """What the schema lists, the worker does."""

    async def run(stage: Stage) -> None:
        worker: Worker = await ready(stage)
        assert set(worker.actor.control._commands._all) == set(COMMANDS)

    play(run)
