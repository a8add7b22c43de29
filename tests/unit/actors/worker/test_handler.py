"""Control commands on a virtual clock: what each state means to requests, and what the log hears of it."""

import asyncio
from typing import Any

import msgspec
import pytest

from headwater.ops.sim.fleet import NAMESPACE
from headwater.schemas import subjects
from headwater.schemas.control import Command, ControlReply
from headwater.schemas.events import BlocksCleared, BlocksStored, WorkerJoined, WorkerLeft
from headwater.schemas.inference import Accepted, Embedded, Refused
from tests.support.data.control_records import audited, folded, states
from tests.support.data.examples import packed
from tests.support.worlds.control import ready
from tests.support.worlds.virtual import Stage, events_of, staged, until


@staged
async def test_status_tells_all_of_it_and_is_not_in_the_audit(stage: Stage) -> None:
    """State, role, load, adapters, epoch, how long it lives, and what runs."""
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


@staged
async def test_sleep_lets_what_runs_end_then_gives_everything_back(stage: Stage) -> None:
    """Nothing new is taken, what runs ends, the log hears every state and that the cache is empty."""
    worker = await ready(stage)
    await worker.given(1, 20)
    sleeping = asyncio.ensure_future(worker.told("sleep", by="ann@box", level=2, within_s=60))
    await asyncio.sleep(0.02)
    refused = await worker.given(2)
    assert refused == Refused("worker w1 is draining", True)
    reply = await sleeping
    assert reply == ControlReply(200, "asleep at level 2", {"migrated": 0})
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


@staged
async def test_what_does_not_end_in_time_is_given_up(stage: Stage) -> None:
    """Sleep aborts it: the edge moves it. It does not wait for ever, and does not sleep over it."""
    worker = await ready(stage)
    await worker.given(1, 1_500)
    began = stage.clock.time()
    reply = await worker.told("sleep", within_s=0.5)
    assert reply == ControlReply(200, "asleep at level 1", {"migrated": 1})
    assert 0.5 <= stage.clock.time() - began < 1.0
    entry = (await worker.status_of(1)).entry
    assert entry is not None
    assert entry.finish == "abort"


@staged
async def test_kv_that_is_kept_for_others_keeps_a_worker_awake_until_it_is_given_up(stage: Stage) -> None:
    """A drain waits for it as for a request; sleep gives it back to the engine when time is over."""
    worker = await ready(stage)
    assert isinstance(await worker.given(1, 4, leg="prefill"), Accepted)
    await until(lambda: worker.actor.inflight.handoffs == 1)
    refused = await worker.told("role", role="decode")
    assert (refused.status, refused.detail) == (
        409,
        "0 requests are in flight, 1 hand-offs are kept: drain it first",
    )
    began = stage.clock.time()
    assert (await worker.told("sleep", within_s=0.5)).status == 200
    assert stage.clock.time() - began >= 0.5
    assert worker.engine.released == ["r1-0-1"]
    assert worker.actor.inflight.handoffs == 0


@staged
async def test_prompts_that_are_pooled_are_work_like_any_other(stage: Stage) -> None:
    """Sleep waits for them, then gives them up and says so: their edge would wait for two minutes."""
    worker = await ready(stage)
    pooled = asyncio.ensure_future(worker.pooled("e1"))
    await until(lambda: len(worker.actor.inflight) == 1)
    assert (await worker.told("status")).data["requests"] == 1
    began = stage.clock.time()
    assert (await worker.told("sleep", within_s=2.0)).data == {"migrated": 1}
    assert await pooled == Refused("the worker aborted it", True)
    assert 2.0 <= stage.clock.time() - began < 2.5
    await worker.told("wake")
    worker.engine.embed_s = 20.0
    pooled = asyncio.ensure_future(worker.pooled("e2"))
    await asyncio.sleep(0.1)
    assert (await worker.told("drain")).data == {"migrated": 0}
    assert isinstance(await pooled, Embedded)


@staged
async def test_blocks_are_gone_from_the_log_even_if_the_engine_keeps_them_in_its_books(stage: Stage) -> None:
    """An engine that says nothing when it sleeps: no router may send a prompt after blocks that are no more."""
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


@pytest.mark.parametrize(
    ("call", "command", "arguments", "first"),
    [
        ("sleep 1", "sleep", {}, None),
        ("pause keep", "pause", {"mode": "keep"}, None),
        ("resume", "resume", {}, "pause"),
        ("profile True", "profile-start", {}, None),
        ("clear-kv", "clear-kv", {}, None),
    ],
)
@staged
async def test_an_engine_that_fails_leaves_the_worker_as_it_was(
    stage: Stage, call: str, command: Command, arguments: dict[str, Any], first: Command | None
) -> None:
    """502 with the engine's words, in the audit as well; and the same command works later."""
    worker = await ready(stage)
    if first is not None:
        assert (await worker.told(first)).status == 200
    before = worker.actor.status
    worker.engine.fails = {call}
    reply = await worker.told(command, **arguments)
    assert (reply.status, reply.detail) == (502, f"{command}: no {call} today")
    assert worker.actor.status == before
    assert (await audited(stage))[-1].status == 502
    worker.engine.fails = set()
    assert (await worker.told(command, **arguments)).status == 200


@staged
async def test_requests_kept_over_a_pause_are_not_lost(stage: Stage) -> None:
    """An edge that wonders hears that the worker knows them; behind the pause they end with all their tokens."""
    worker = await ready(stage)
    await worker.given(1, 50)
    await asyncio.sleep(0.05)
    reply = await worker.told("pause", mode="keep")
    assert reply == ControlReply(200, "paused, 1 requests kept", {"migrated": 0, "kept": 1})
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
    await until(lambda: not len(worker.actor.inflight))
    done = (await worker.status_of(1)).entry
    assert done is not None
    assert (len(done.tokens), done.finish) == (50, "length")


@pytest.mark.parametrize(
    ("mode", "within_s", "moved"), [("abort", 30.0, 1), ("wait", 0.2, 1), ("wait", 60.0, 0)]
)
@staged
async def test_a_pause_without_keeping_leaves_nothing_running(
    stage: Stage, mode: str, within_s: float, moved: int
) -> None:
    """Aborted at once, or after a while, or not at all as it ended in time."""
    worker = await ready(stage)
    await worker.given(1, 200)
    reply = await worker.told("pause", mode=mode, within_s=within_s)
    assert (reply.status, reply.data) == (200, {"migrated": moved, "kept": 0})
    assert len(worker.actor.inflight) == 0


@staged
async def test_a_drained_worker_stays_and_may_change_its_role(stage: Stage) -> None:
    """Same lease, same epoch, one joining in the log; the role only once nothing runs."""
    worker = await ready(stage)
    epoch = worker.actor.epoch
    await worker.given(1, 100)
    busy = await worker.told("role", role="prefill")
    assert (busy.status, busy.detail) == (
        409,
        "1 requests are in flight, 0 hand-offs are kept: drain it first",
    )
    drained = await worker.told("drain")
    assert drained.status == 200
    assert len(worker.actor.inflight) == 0
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
