"""A falling hit rate is found within a minute and points to its cause, and a worker that left is one; a healthy fleet has no such finding."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from headwater.ops.history.columns import spread
from headwater.ops.history.findings import fallen_hits, findings
from headwater.ops.history.history import FleetAt, Mark
from headwater.ops.history.requests import Request, RequestTable
from headwater.ops.sim.fleet import SETTINGS, SimFleet
from headwater.ops.sim.loop import VirtualLoop
from tests.sim.disaggregated import ask, fleet_of
from tests.support.worlds.clock import WALL_NS
from tests.support.worlds.told import records_of
from tests.support.worlds.told_fleet import told_fleet
from tests.support.worlds.virtual import virtual
from tests.unit.ops.console.test_app import call, open_app

LARGE = SETTINGS._replace(total_blocks=6_000, step_tokens_max=2_048)
"""Caches that hold all prefixes."""

CONVERSATIONS = 40
HEALTHY_S, AFTER_S = 240, 70
EVERY_S = 0.5

TITLE = "The cache hit rate fell"


def prompt(draw: random.Random, first: int) -> list[int]:
    """One of some conversations whose prompts begin with 480 tokens of their own, and 40 new tokens. `first` is the first token."""
    conversation = draw.randrange(CONVERSATIONS)
    return [first, *([50 + conversation] * 479), *draw.choices(range(9, 90), k=40)]


async def load(fleet: SimFleet, seconds: float, first: Callable[[], int]) -> None:
    """Requests at random times for some seconds. `first` is the token that each begins with."""
    draw = random.Random(7)
    loop_ = asyncio.get_running_loop()
    end, tasks = loop_.time() + seconds, []
    while loop_.time() < end:
        tasks.append(asyncio.ensure_future(ask(fleet, prompt(draw, first()), draw.randrange(2, 9))))
        await asyncio.sleep(draw.expovariate(1 / EVERY_S))
    await asyncio.gather(*tasks)


async def findings_at(app: Any, time_ms: float) -> list[Any]:
    """The findings of a fallen hit rate at a time."""
    at = (await call(app, f"/api/position?time_ms={time_ms}")).document["position"]
    findings = (await call(app, f"/api/fleet?at={at}")).document["findings"]
    return [one for one in findings if one["title"] == TITLE]


async def staged(
    clock: VirtualLoop, change: Callable[[SimFleet], Awaitable[Callable[[], int]]]
) -> dict[int, list[Any]]:
    """The findings every five seconds, by the seconds since a change that `change` makes to a healthy fleet."""
    async with fleet_of(clock, roles=("both", "both"), settings=LARGE) as fleet:
        app = open_app(fleet)
        await load(fleet, HEALTHY_S, lambda: 7)
        changed_ms = (await records_of(fleet))[-1].stored_ns / 1e6
        first = await change(fleet)
        await load(fleet, AFTER_S, first)
        await call(app, "/api/fleet")
        await asyncio.sleep(2)
        assert (await call(app, "/api/log")).document["last_ms"] > changed_ms + 1_000 * AFTER_S
        return {
            second: await findings_at(app, changed_ms + 1_000 * second)
            for second in range(5 - HEALTHY_S, AFTER_S, 5)
        }


async def nothing(fleet: SimFleet) -> Callable[[], int]:
    """The same prompts as before."""
    return lambda: 7


async def other_prompts(fleet: SimFleet) -> Callable[[], int]:
    """Each prompt begins with something new, such as the time of day."""
    numbers = iter(range(100, 1 << 20))
    return lambda: next(numbers)


async def some_other_prompts(fleet: SimFleet) -> Callable[[], int]:
    """Those of half of the clients do."""
    numbers, draw = iter(range(100, 1 << 20)), random.Random(2)
    return lambda: next(numbers) if draw.random() < 0.5 else 7


async def restart(fleet: SimFleet) -> Callable[[], int]:
    """The workers lose their caches, one after the other."""
    for name in fleet.engines:
        await fleet.kill(name)
        fleet.start(name)
        await asyncio.sleep(4)
    return lambda: 7


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (other_prompts, "the router expected no more: prompts begin otherwise"),
        pytest.param(
            some_other_prompts, "the router expected no more: prompts begin otherwise", marks=pytest.mark.soak
        ),
        pytest.param(restart, "joined with an empty cache", marks=pytest.mark.soak),
    ],
)
@virtual
async def test_a_fall_is_found_within_a_minute(clock: VirtualLoop, change: Any, cause: str) -> None:
    """Since where it began, and for as long as it lasts; before there is no finding."""
    found = await staged(clock, change)
    assert not [second for second, some in found.items() if some and second <= 0]
    first = min(second for second, some in found.items() if some)
    assert first < 60
    for second, some in found.items():
        if second >= first:
            [one] = some
            assert cause in one["text"]
            assert one["remedy"]
            assert one["request"]
            assert one["position"]


@virtual
async def test_a_healthy_fleet_has_no_such_finding(clock: VirtualLoop) -> None:
    """Though it begins with empty caches, and its prompts come in no order."""
    assert not [second for second, some in (await staged(clock, nothing)).items() if some]


def requests(
    draw: random.Random, count: int, cached: float, workers: tuple[str, ...] = ("a", "b")
) -> list[Request]:
    """Requests of very different lengths; each has all of its prompt cached or nothing, the former with probability `cached`."""
    found = []
    for number in range(count):
        tokens = int(draw.paretovariate(1.3) * 200)
        row = Request(
            f"r{number}", number, "chat", "m", tokens, 9, True, 1, 0, "s", number, started_ns=number + 1
        )
        row.workers = ((number, draw.choice(workers)),)
        row.found_tokens = row.expected_tokens = tokens if draw.random() < cached else 0
        found.append(row)
    return found


def test_what_a_rate_varies_by_is_no_fall() -> None:
    """Not once in many draws, at any rate; few requests say nothing at all."""
    draw = random.Random(4)
    for trial in range(400):
        rate = draw.random()
        count = draw.randrange(20, 200)
        assert fallen_hits(requests(draw, count, rate), requests(draw, 5 * count, rate)) is None, trial
    assert fallen_hits(requests(draw, 19, 0.0), requests(draw, 500, 1.0)) is None
    assert fallen_hits(requests(draw, 500, 0.0), requests(draw, 19, 1.0)) is None
    assert fallen_hits([], []) is None


def test_a_fall_names_where_it_began_the_worker_and_what_was_expected() -> None:
    """One worker lost its blocks, and the router still counts on them."""
    draw = random.Random(5)
    before = requests(draw, 400, 0.9)
    recent = [*requests(draw, 100, 0.9), *requests(draw, 100, 0.9)]
    for row in recent[100:]:
        if row.workers[0][1] == "b":
            row.found_tokens = 0
    fallen = fallen_hits(recent, before)
    assert fallen is not None
    assert fallen.worker == "b"
    assert fallen.expected is not None
    assert fallen.expected - fallen.now > 0.2
    assert fallen.first in recent[85:115]
    for row in recent[100:]:
        row.found_tokens = 0
    fallen = fallen_hits(recent, before)
    assert fallen is not None
    assert fallen.worker == ""
    assert fallen.first in recent[90:101]


def test_of_very_many_requests_some_are_compared() -> None:
    """Evenly spaced, from the first on; few are all taken."""
    rows = requests(random.Random(1), 1_001, 0.5)
    assert spread(rows, 1_001) is rows
    for limit in (1, 7, 500, 1_000):
        some = list(spread(rows, limit))
        assert 0 < len(some) <= limit
        assert some == rows[:: rows.index(some[1]) if len(some) > 1 else len(rows)]


@pytest.mark.parametrize(
    ("reason", "workers", "wanted"),
    [
        ("stopped", ("w1",), [("info", "w2 is gone")]),
        ("lease lapsed", ("w1",), [("critical", "w2 is gone")]),
        ("lease lapsed", ("w1", "w2"), [("warning", "w2 was lost and came back")]),
        ("drained", ("w1", "w2"), []),
        ("stopped", (), [("critical", "No worker takes requests"), ("info", "w2 is gone")]),
    ],
)
async def test_a_worker_that_left_is_a_finding(
    reason: str, workers: tuple[str, ...], wanted: list[tuple[str, str]]
) -> None:
    """As severe as it was unexpected, and as long as it is away."""
    told = await told_fleet()
    await told.join(*workers)
    marks = [Mark(WALL_NS, 3, "left", "w2", 1, f"left: {reason}")]
    found = findings(FleetAt(9, WALL_NS, told.state.loads), RequestTable(), marks)
    assert [(one.severity, one.title) for one in found] == wanted
