"""Two known failures of routers that follow caches: one slow worker ends affinity for everybody, and a hot prefix stays where it is."""

from collections import Counter, deque
from typing import Final

import pytest

from headwater.ops.bench.trace import TRACE_BLOCK, Trace, TraceRequest
from headwater.ops.whatif.run import run
from headwater.ops.whatif.setup import Setup
from headwater.router.state import RouterState
from headwater.schemas.events import BlocksStored, LoadReported, Role
from headwater.schemas.routing import Candidate, Decision
from tests.support.data.examples import packed
from tests.support.data.story import tell
from tests.unit.router.test_estimates import BLOCKS, MS, ask, fleet, measured, of, took

FAST: Final = [f"w{number}" for number in range(1, 8)]
SLOW: Final = "w8"
PREFIXES: Final = 12
TOKENS: Final = 3_200
REQUESTS: Final = 240
LONG: Final = 51_200


def complete(state: RouterState, decision: Decision, at_ms: int, slowness: float) -> None:
    """A worker accepts the request, computes its prompt, reports the time that took, and stores its blocks."""
    uncached = TOKENS - decision.chosen.cached_blocks * 16
    done = (decision.request,)
    sample = (uncached, round(1_000 * slowness * took(uncached)))
    report = LoadReported(0, 0, 0, BLOCKS, done, done, done, prefills=(sample,))
    for event in (BlocksStored(0, packed(*blocks_of(decision.request))), report):
        tell(state, event, writer=decision.worker, wall_ns=at_ms * MS)


def blocks_of(request: str) -> range:
    """The prompt's blocks: those of one of the prefixes, or for the eighth worker its own."""
    number = int(request[1:])
    first = 1 + 1_000 * (number % PREFIXES if request.startswith("r") else PREFIXES + number)
    return range(first, first + TOKENS // 16)


def choices_beside(slowness: float) -> tuple[list[Candidate], Decision]:
    """Who gets each request of seven workers while the eighth, which gets its own, takes `slowness` times as long; and a last decision.

    Only the eighth has computed prompts as long as that of the last one.
    """
    roles: dict[str, Role] = dict.fromkeys((*FAST, SLOW), "both")
    state = fleet(**roles)
    for _ in range(12):
        for name in (*FAST, SLOW):
            measured(state, name, slowness if name == SLOW else 1.0, (400, 1_600, 6_400), 15)
    measured(state, SLOW, slowness, (LONG,), 20)
    found: list[Candidate] = []
    computing: deque[tuple[Decision, float]] = deque()
    for number in range(REQUESTS):
        at_ms = 20 * number
        first = blocks_of(f"r{number}").start
        own = ask(state, TOKENS, at_ms=at_ms, name=f"r{number}", first=first, exclude=(f"{SLOW}.1",))
        tell(state, own, writer="r")
        found.append(own.chosen)
        computing.append((own, 1.0))
        if number % 8 == 0:
            first = blocks_of(f"s{number}").start
            other = ask(state, TOKENS, at_ms=at_ms, name=f"s{number}", first=first, pinned=SLOW)
            tell(state, other, writer="r")
            if slowness == 1.0 or number % 16 == 0:
                # The slow one keeps up with half of them, so that its queue grows.
                computing.append((other, slowness))
        while len(computing) > 9:
            done, factor = computing.popleft()
            complete(state, done, at_ms, factor)
    return found, ask(state, LONG, at_ms=20 * REQUESTS, name="long", first=900_000)


def shares_of(choices: list[Candidate]) -> list[int]:
    """How many requests each worker got, ascending."""
    return sorted(Counter(one.worker for one in choices).values())


def test_one_slow_worker_does_not_change_the_choices_among_the_others() -> None:
    """Neither their affinity nor what is predicted for them follows from what an eighth worker needs, or from its backlog."""
    usual, before = choices_beside(1.0)
    beside, after = choices_beside(2.0)
    assert of(after, SLOW).queue_ms > of(before, SLOW).queue_ms + 1_000
    # Which of several idle workers gets a new prefix is chance, so names are not compared.
    assert [bool(one.cached_blocks) for one in beside] == [bool(one.cached_blocks) for one in usual]
    assert shares_of(beside) == shares_of(usual)
    assert len(shares_of(usual)) == len(FAST)
    for name in FAST:
        assert of(after, name).prefill_ms == pytest.approx(took(LONG), rel=0.1)
    assert of(after, SLOW).prefill_ms == pytest.approx(2 * took(LONG), rel=0.1)


HOT_TOKENS: Final = 16 * TRACE_BLOCK


def hot(count: int, gap_ns: int) -> Trace:
    """Requests for one prefix, each with a short question of its own."""
    shared = tuple(range(16))
    return Trace(
        "hot",
        tuple(
            TraceRequest(f"r{number}", number * gap_ns, HOT_TOKENS + 200, 30, (*shared, 100 + number))
            for number in range(count)
        ),
    )


@pytest.mark.parametrize("policy", ["kv", "slo", "lmetric"])
def test_a_prefix_requested_faster_than_its_worker_serves_it_spreads(policy: str) -> None:
    """At five times the rate of one worker, at least five of eight hold it and share the requests."""
    alone = run(hot(60, 0), Setup(workers=1, policy=policy))
    per_request_ns = max(one.done_ns for one in alone.served) // 60
    ran = run(hot(300, per_request_ns // 5), Setup(workers=8, policy=policy))
    shares = Counter(one.worker for one in ran.served)
    assert sum(share >= 300 / 16 for share in shares.values()) >= 5
    assert max(shares.values()) <= 300 / 3
    # While each computes the prefix once, requests wait for it; at one worker the last would wait for more than two seconds.
    assert max(one.first_ns - one.request.arrival_ns for one in ran.served) < 1e9
