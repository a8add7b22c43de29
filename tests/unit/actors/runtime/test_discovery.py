"""Discovery as the stock `nats` tool asks for it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from headwater import __version__
from headwater.actors.runtime.ports import MemoryBus, NoResponder
from headwater.actors.runtime.tables import Requests, ServiceEndpoint

KINDS = {"PING": "ping", "INFO": "info", "STATS": "stats"}


@asynccontextmanager
async def serving(bus: MemoryBus, name: str, stats: dict[str, Any]) -> AsyncIterator[ServiceEndpoint]:
    """One worker's entry, while the block runs."""
    service = ServiceEndpoint(bus, "worker", name, lambda: stats)
    await service.start()
    try:
        yield service
    finally:
        await service.stop()


async def ask(bus: MemoryBus, subject: str) -> dict[str, Any]:
    """The first answer to a question."""
    answer: dict[str, Any] = msgspec.json.decode(await bus.request(subject, b"", timeout_s=1.0))
    return answer


@pytest.mark.parametrize("verb", KINDS)
@pytest.mark.parametrize("scope", ["", ".headwater-worker", ".headwater-worker.w1"])
async def test_every_question_is_answered_in_every_scope(verb: str, scope: str) -> None:
    """All services, those of a name, and one by its id; the answer says what it is and who it is."""
    bus = MemoryBus()
    async with serving(bus, "w1", {"running": 3}):
        answer = await ask(bus, f"$SRV.{verb}{scope}")
    assert answer["type"] == f"io.nats.micro.v1.{KINDS[verb]}_response"
    assert (answer["name"], answer["id"], answer["version"]) == ("headwater-worker", "w1", __version__)
    assert answer["metadata"] == {"kind": "worker"}


async def test_statistics_are_those_of_the_moment() -> None:
    """The actor's own numbers, as an endpoint's data, read when they are asked for."""
    bus = MemoryBus()
    stats = {"running": 3}
    async with serving(bus, "w1", stats):
        stats["running"] = 4
        [endpoint] = (await ask(bus, "$SRV.STATS.headwater-worker.w1"))["endpoints"]
    assert endpoint["data"] == {"running": 4}
    assert {"name", "subject", "num_requests", "num_errors"} <= endpoint.keys()


async def test_requests_and_errors_are_counted() -> None:
    """In the fields in which NATS's own tools and dashboards look for them."""
    bus = MemoryBus()
    counts = Requests()
    service = ServiceEndpoint(bus, "worker", "w1", dict, counts)
    await service.start()
    try:
        counts.total += 3
        counts.errors += 1
        [endpoint] = (await ask(bus, "$SRV.STATS.headwater-worker.w1"))["endpoints"]
    finally:
        await service.stop()
    assert (endpoint["num_requests"], endpoint["num_errors"]) == (3, 1)


async def test_a_question_for_another_is_not_answered() -> None:
    """Other names and other ids hear nothing from this one."""
    bus = MemoryBus()
    async with serving(bus, "w1", {}):
        for subject in ("$SRV.PING.headwater-router", "$SRV.PING.headwater-worker.w2", "$SRV.OTHER"):
            with pytest.raises(NoResponder):
                await ask(bus, subject)


async def test_each_actor_answers_for_itself() -> None:
    """Two workers of one name are told apart by id."""
    bus = MemoryBus()
    async with serving(bus, "w1", {"n": 1}), serving(bus, "w2", {"n": 2}):
        for name, number in (("w1", 1), ("w2", 2)):
            answer = await ask(bus, f"$SRV.STATS.headwater-worker.{name}")
            assert answer["endpoints"][0]["data"] == {"n": number}


async def test_a_question_that_wants_no_answer_gets_none() -> None:
    """A message without a reply subject is no reason to fail."""
    bus = MemoryBus()
    async with serving(bus, "w1", {}):
        await bus.publish("$SRV.PING", b"")
        assert (await ask(bus, "$SRV.PING"))["id"] == "w1"


async def test_a_stopped_service_is_silent() -> None:
    """After `stop` nobody answers; starting again is possible, stopping twice is fine."""
    bus = MemoryBus()
    async with serving(bus, "w1", {}) as service:
        await service.stop()
        with pytest.raises(NoResponder):
            await ask(bus, "$SRV.PING")
        await service.stop()
        await service.start()
        assert (await ask(bus, "$SRV.PING"))["id"] == "w1"
