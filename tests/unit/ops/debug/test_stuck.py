"""`headwater stuck`: what is read of the logs and tables of a fleet, and how it is shown."""

import json

import msgspec
import pytest

from headwater.events.memory import MemoryLog
from headwater.ops.debug.stuck import open_requests, show
from headwater.schemas.events import (
    RequestAccepted,
    RequestEnded,
    RequestRouted,
    RequestsOpen,
    RequestStarted,
    WorkerChanged,
)
from headwater.schemas.subjects import lease_key
from headwater.schemas.tables import Lease, ModelCard
from tests.support.data.queries import route_query
from tests.support.worlds.told_fleet import ToldFleet, clock_of, told_fleet

Capture = pytest.CaptureFixture[str]


async def lease(told: ToldFleet, kind: str, name: str, pool: str = "p") -> None:
    """A process holds its lease."""
    held = Lease(kind=kind, name=name, pool=pool, epoch=1)
    await told.ports.leases.put(lease_key(kind, name), msgspec.json.encode(held))  # type: ignore[arg-type]


async def card(told: ToldFleet, name: str, pool: str) -> None:
    """A model is served by a pool."""
    made = ModelCard(
        name=name,
        pool=pool,
        block_size=16,
        context_length=1000,
        tokenizer="",
        chat_template="",
        special_tokens={},
        eos_token_ids=(),
        engine="sim",
        capabilities=(),
        created_s=0,
    )
    await told.ports.cards.put(pool, msgspec.json.encode(made))


def accepted(request: str, model: str = "m") -> RequestAccepted:
    return RequestAccepted(request, model, "chat", 96, 50, True)


async def a_fleet() -> ToldFleet:
    """A request that generates on a paused worker, one that has ended, and one that was accepted just now; 30 s on."""
    told = await told_fleet()
    await told.join("w1", "w2")
    for kind, name in (("worker", "w1"), ("worker", "w2"), ("router", "r1"), ("edge", "e1")):
        await lease(told, kind, name)
    await told.tell_request(accepted("a"), RequestsOpen(0))
    await told.tell_request(accepted("b"), RequestEnded("b", "stop", 1, 0, 0, 1.0, 1.0), RequestsOpen(0))
    await told.decide(route_query("a-0-1", 96, pinned="w1"))
    started = RequestStarted("a", 0, "w1", 1, 0, 9.0)
    await told.tell_request(RequestRouted("a", 0, "a-0-1", "w1", 1, 0), started, RequestsOpen(0))
    await told.tell("fleet", "w1", WorkerChanged("w1", 1, "paused", "both"))
    await clock_of(told).advance(29)
    await told.report("w1", 1, prefilled=("a-0-1",))
    await told.report("w2")
    await told.tell_request(accepted("c"), RequestsOpen(0))
    await clock_of(told).advance(1)
    return told


async def test_it_is_told_with_its_remedy(capsys: Capture) -> None:
    told = await a_fleet()
    assert await show(told.ports, "p") == 1
    assert capsys.readouterr().out.splitlines() == [
        "pool p: 1 of 2 open requests make no progress",
        "a (chat of e1, 96 prompt tokens): no event for 30.0 s",
        "  decode since 2027-01-15T08:00:00.000Z: waits for further tokens of w1",
        "    w1 is paused",
        "    w1 has computed its prompt",
        "    remedy: headwater ctl w1 resume",
    ]
    assert await show(told.ports, "p", 31.0) == 0
    assert capsys.readouterr().out == "pool p: each of 2 open requests had an event in the last 31 s\n"


async def test_it_is_an_object_for_programs(capsys: Capture) -> None:
    told = await a_fleet()
    assert await show(told.ports, "p", 0.5, as_json=True) == 1
    data = json.loads(capsys.readouterr().out)
    assert (data["pool"], data["open"]) == ("p", 2)
    assert [one["request"] for one in data["stuck"]] == ["a", "c"]
    waiting = data["stuck"][0]["waiting"][0]
    assert (waiting["worker"], waiting["state"]) == ("w1", "decode")
    assert data["stuck"][1]["waiting"][0]["waits_for"] == "a router to choose a worker"


async def test_requests_of_other_pools_are_not_listed(capsys: Capture) -> None:
    """By their model, and by the pool of their worker."""
    told = await a_fleet()
    await lease(told, "worker", "x1", "other")
    await card(told, "n", "other")
    await card(told, "m", "p")
    await told.tell_request(accepted("d", "n"))
    await told.tell_request(accepted("e", "m"), RequestRouted("e", 0, "e-0-1", "x1", 1, 0))
    await clock_of(told).advance(60)
    await show(told.ports, "p", as_json=True)
    assert [one["request"] for one in json.loads(capsys.readouterr().out)["stuck"]] == ["a", "c"]


async def test_a_silent_worker_is_told(capsys: Capture) -> None:
    """Also one that was so for longer than reports are looked for."""
    told = await a_fleet()
    for seconds, wanted in ((9, "for 10 s"), (300, "for 60 s")):
        await clock_of(told).advance(seconds)
        await show(told.ports, "p")
        assert f"w1 has not reported its load {wanted}" in capsys.readouterr().out


async def test_requests_that_are_open_for_long_are_found() -> None:
    """The edges' marks say how far back the log has to be read; what is gone of it is not asked for."""
    told = await a_fleet()
    await clock_of(told).advance(7200)
    await told.tell_request(RequestsOpen(0))
    assert {one.id for one in await open_requests(told.ports, told.ports.clock.wall_ns())} == {"a", "c"}
    await told.tell_request(RequestEnded("a", "stop", 1, 0, 0, 1.0, 1.0), RequestsOpen(3))
    assert {one.id for one in await open_requests(told.ports, told.ports.clock.wall_ns())} == {"c"}
    assert isinstance(told.ports.requests, MemoryLog)
    told.ports.requests.purge(5)
    assert await open_requests(told.ports, told.ports.clock.wall_ns()) == []
