"""Open requests without progress: which they are, what each waits for, and the remedy."""

from typing import Any

import pytest

from headwater.events.ports import Record
from headwater.ops.history.stuck import OpenRequests, Stuck, Surroundings, Waiting, stuck_requests
from headwater.schemas.encoding import SCHEMA_VERSION, Batch
from headwater.schemas.events import (
    Event,
    KvGap,
    LoadReported,
    RequestAccepted,
    RequestCheckpoint,
    RequestEnded,
    RequestPrefilled,
    RequestRouted,
    RequestsOpen,
    RequestStarted,
    RequestStepped,
    WorkerChanged,
    WorkerDraining,
    WorkerLeft,
)
from headwater.schemas.tables import Lease
from tests.support.data.examples import joined
from tests.support.data.queries import route_query
from tests.support.worlds.clock import WALL_NS
from tests.support.worlds.told_fleet import ToldFleet, told_fleet

SECOND = 1_000_000_000
QUIET = 10 * SECOND


def at(second: float, *events: Event, edge: str = "e1", epoch: int = 1) -> Record:
    """A message of the request log, stored so many seconds after the start."""
    now_ns = WALL_NS + int(second * SECOND)
    batch: Batch[Event] = Batch(SCHEMA_VERSION, edge, epoch, 1, now_ns, events)
    return Record(1, f"hw.ns.req.{edge}", now_ns, batch)  # type: ignore[arg-type]


def accepted(request: str = "a", choices: int = 1) -> RequestAccepted:
    return RequestAccepted(request, "m", "chat", 96, 50, True, choices)


ROUTED = RequestRouted("a", 0, "a-0-1", "w1", 1, 0)
PREFILL = RequestRouted("a", 0, "a-0-1", "w1", 1, 0, "prefill")
DECODE = RequestRouted("a", 0, "a-0-2", "w2", 1, 0, "decode", "h1")


def folded(*records: Record) -> OpenRequests:
    """The open requests after these messages."""
    found = OpenRequests()
    for one in records:
        found.fold(one)
    return found


LEASES = (
    Lease(kind="edge", name="e1", epoch=1),
    Lease(kind="router", name="r1", pool="p", epoch=1),
    Lease(kind="worker", name="w1", pool="p", epoch=1),
    Lease(kind="worker", name="w2", pool="p", epoch=1),
)


async def fleet_of(*told: tuple[str, str, Event]) -> ToldFleet:
    """Two workers, after these events of a kind by a writer."""
    made = await told_fleet()
    await made.join("w1", "w2")
    for kind, writer, event in told:
        await made.tell(kind, writer, event)  # type: ignore[arg-type]
    return made


def around(made: ToldFleet, seconds: float = 60, **fields: Any) -> Surroundings:
    """The pool so many seconds after the start; all report, and all have leases."""
    now_ns = WALL_NS + int(seconds * SECOND)
    known = Surroundings(
        "p",
        now_ns,
        made.state.loads.workers,
        frozenset(made.state.cold),
        LEASES,
        {"w1": now_ns, "w2": now_ns},
    )
    return known._replace(**fields)


def only(found: list[Stuck]) -> Waiting:
    """What the only choice of the only stuck request waits for."""
    [[one]] = [stuck.waiting for stuck in found]
    return one


async def test_it_is_stuck_after_some_time_without_an_event() -> None:
    """Of any kind; one that has ended is not open."""
    made = await fleet_of()
    open_ = folded(at(0, accepted()), at(1, ROUTED), at(30, RequestStarted("a", 0, "w1", 1, 0, 5.0)))
    for second, wanted in ((39, 0), (41, 1)):
        assert len(stuck_requests(open_.open.values(), around(made, second), QUIET)) == wanted
    open_.fold(at(45, RequestCheckpoint("a", 0, 64)))
    assert not stuck_requests(open_.open.values(), around(made, 50), QUIET)
    [one] = stuck_requests(open_.open.values(), around(made, 60), QUIET)
    assert (one.request, one.edge, one.quiet_ns, one.prompt_tokens) == ("a", "e1", 15 * SECOND, 96)
    open_.fold(at(60, RequestEnded("a", "stop", 64, 0, 0, 5.0, 9.0)))
    assert not open_.open


async def test_a_slow_worker_gets_the_time_that_a_checkpoint_takes() -> None:
    """64 tokens at 200 ms are 12.8 s, twice that is allowed; before the first token it does not count."""
    made = await fleet_of(("load", "w1", LoadReported(1, 0, 9, 1000, step_us=200_000, gaps=9)))
    open_ = folded(at(0, accepted()), at(1, ROUTED))
    assert stuck_requests(open_.open.values(), around(made, 12), QUIET)
    open_.fold(at(1, RequestStarted("a", 0, "w1", 1, 0, 5.0)))
    assert not stuck_requests(open_.open.values(), around(made, 25), QUIET)
    assert stuck_requests(open_.open.values(), around(made, 28), QUIET)


async def test_all_choices_must_be_quiet() -> None:
    """One that is done has no event of its own."""
    made = await fleet_of()
    other = RequestRouted("a", 1, "a-1-1", "w2", 1, 0)
    open_ = folded(at(0, accepted(choices=2)), at(1, ROUTED, other), at(20, RequestCheckpoint("a", 1, 64)))
    assert not stuck_requests(open_.open.values(), around(made, 25), QUIET)
    [one] = stuck_requests(open_.open.values(), around(made, 31), QUIET)
    assert [waiting.worker for waiting in one.waiting] == ["w1", "w2"]


@pytest.mark.parametrize(
    ("told", "what", "state"),
    [
        ([], "a router to choose a worker", "routing"),
        ([ROUTED], "the first token of w1", "decode"),
        ([ROUTED, RequestStarted("a", 0, "w1", 1, 0, 5.0)], "further tokens of w1", "decode"),
        (
            [ROUTED, RequestStarted("a", 0, "w1", 1, 0, 5.0), RequestCheckpoint("a", 0, 64)],
            "further tokens of w1, after 64 tokens",
            "decode",
        ),
        ([PREFILL], "the prefill of w1", "prefill"),
        (
            [PREFILL, RequestPrefilled("a", 0, "w1", 1, "h1", 9.0)],
            "a router to choose a decode worker for its KV on w1",
            "handoff",
        ),
        ([PREFILL, RequestPrefilled("a", 0, "w1", 1, "h1", 9.0), DECODE], "the first token of w2", "decode"),
        (
            [ROUTED, RequestStepped("a", 0, "decode", "lost", "routing", "w1", 1, "")],
            "a router to choose a worker",
            "routing",
        ),
    ],
)
async def test_what_it_waits_for(told: list[Event], what: str, state: str) -> None:
    open_ = folded(at(0, accepted()), at(1, *told))
    waiting = only(stuck_requests(open_.open.values(), around(await fleet_of()), QUIET))
    assert (waiting.waits_for, waiting.state) == (what, state)
    assert waiting.since_ns == WALL_NS + (SECOND if told else 0)
    assert waiting.quiet_ns == 60 * SECOND - (SECOND if told else 0)


ALL_READY = (
    "it is in a router's queue if all of them are saturated: add workers, or raise the limits of --busy"
)


@pytest.mark.parametrize(
    ("told", "leases", "fact", "remedy"),
    [
        (
            [],
            LEASES,
            "2 workers take requests; 0 requests wait in their engines, 0 prompt tokens are queued",
            ALL_READY,
        ),
        ([], (LEASES[0],), "no router of pool p holds a lease", "start one: headwater router --pool p"),
        (
            [],
            (Lease(kind="router", name="r1", pool="p", stalled=True), LEASES[0]),
            "router r1 cannot write to its log",
            "free disk space on the NATS server, or restore its peers",
        ),
        (
            [
                ("fleet", "w1", WorkerDraining("w1", 1)),
                ("fleet", "w2", WorkerChanged("w2", 1, "sleeping", "both")),
            ],
            LEASES,
            "w1 is draining, w2 is sleeping",
            "resume or wake one of them (headwater ctl WORKER resume), or start another",
        ),
        (
            [("fleet", "r1", WorkerLeft("w1", 1, "")), ("fleet", "r1", WorkerLeft("w2", 1, ""))],
            LEASES,
            "no worker is in the pool",
            "start workers: headwater engine",
        ),
    ],
)
async def test_why_no_worker_was_chosen(
    told: list[tuple[str, str, Event]], leases: tuple[Lease, ...], fact: str, remedy: str
) -> None:
    made = await fleet_of(*told)
    waiting = only(
        stuck_requests(folded(at(0, accepted())).open.values(), around(made, leases=leases), QUIET)
    )
    assert (waiting.facts, waiting.remedy) == ((fact,), remedy)


@pytest.mark.parametrize(
    ("told", "fields", "fact", "remedy"),
    [
        (
            [("fleet", "w1", WorkerChanged("w1", 1, "paused", "both"))],
            {},
            "w1 is paused",
            "headwater ctl w1 resume",
        ),
        (
            [("fleet", "w1", WorkerChanged("w1", 1, "sleeping", "both"))],
            {},
            "w1 is asleep",
            "headwater ctl w1 wake",
        ),
        (
            [("fleet", "w1", WorkerDraining("w1", 1))],
            {},
            "w1 is draining: it finishes",
            "look at w1: headwater ctl w1 status",
        ),
        ([("kv", "w1", KvGap(1))], {}, "w1 is cold: KV events of it are missing", "look at w1"),
        (
            [("fleet", "r1", WorkerLeft("w1", 1, ""))],
            {},
            "w1 has left the pool",
            "its edge moves the request",
        ),
        ([("fleet", "w1", joined("w1", 1))], {"leases": LEASES[:2]}, "w1 holds no lease", "restart w1"),
        (
            [],
            {"leases": (*LEASES[:2], Lease(kind="worker", name="w1", stalled=True))},
            "w1 cannot write to its log",
            "free disk space",
        ),
        (
            [],
            {"reported_ns": {"w1": WALL_NS + 50 * SECOND}},
            "w1 has not reported its load for 10 s",
            "its process may hang",
        ),
        (
            [("load", "w1", LoadReported(5, 3, 990, 1000))],
            {},
            "3 requests wait in its engine, 5 run, with 990 of 1000 KV blocks in use",
            "add workers, or limit the context",
        ),
    ],
)
async def test_what_is_known_of_the_worker(
    told: list[tuple[str, str, Event]], fields: dict[str, Any], fact: str, remedy: str
) -> None:
    made = await fleet_of(*told)
    open_ = folded(at(0, accepted()), at(1, ROUTED))
    waiting = only(stuck_requests(open_.open.values(), around(made, **fields), QUIET))
    assert waiting.facts[0].startswith(fact)
    assert waiting.remedy.startswith(remedy)


async def test_a_new_incarnation_does_not_have_it() -> None:
    made = await fleet_of()
    await made.tell("fleet", "w1", joined("w1", 3), epoch=3)
    open_ = folded(at(0, accepted()), at(1, ROUTED))
    waiting = only(stuck_requests(open_.open.values(), around(made), QUIET))
    assert waiting.facts == ("w1 has restarted: epoch 1 has ended, 3 serves",)


async def test_where_it_stands_at_its_worker() -> None:
    """Not accepted, behind another prompt, computed, ended."""
    made = await fleet_of()
    open_ = folded(at(0, accepted()), at(1, ROUTED))

    def fact() -> str:
        return only(stuck_requests(open_.open.values(), around(made), QUIET)).facts[-1]

    await made.decide(route_query("b-0-1", 64, pinned="w1"))
    await made.decide(route_query("a-0-1", 64, pinned="w1"))
    assert fact() == "w1 has not reported that it accepted it"
    await made.report("w1", 2, accepted=("b-0-1", "a-0-1"))
    assert fact() == "w1 has accepted it; 1 prompts are to be computed before it"
    await made.report("w1", 2, prefilled=("b-0-1", "a-0-1"))
    assert fact() == "w1 has computed its prompt"
    await made.report("w1", 1, finished=("a-0-1",))
    assert fact() == "w1 has reported that it has ended, and its edge has not noted that"


async def test_a_decision_is_progress_and_names_the_worker() -> None:
    """Of a request that its edge has not dispatched yet, and of the second leg."""
    made = await fleet_of()
    decision = await made.decide(route_query("a-0-1", 64, pinned="w1"))
    decided: dict[str, Any] = {"decisions": {"a": decision}, "decided_ns": {"a": WALL_NS + 20 * SECOND}}
    routing = folded(at(0, accepted()))
    assert not stuck_requests(routing.open.values(), around(made, 29, **decided), QUIET)
    waiting = only(stuck_requests(routing.open.values(), around(made, 40, **decided), QUIET))
    assert waiting.worker == "w1"
    assert waiting.waits_for == f"w1 to accept it, as decided at log position {decision.position}"
    # One that was made before the request came back to the routers is none for it.
    moved = folded(
        at(0, accepted()), at(25, RequestStepped("a", 0, "decode", "lost", "routing", "w1", 1, ""))
    )
    waiting = only(stuck_requests(moved.open.values(), around(made, 40, **decided), QUIET))
    assert waiting.waits_for == "a router to choose a worker"


@pytest.mark.parametrize(
    ("lease", "fact"),
    [
        ((), "edge e1 is gone: the next edge of that name ends this request"),
        ((Lease(kind="edge", name="e1", epoch=2),), "edge e1 has restarted, as epoch 2, and will end"),
        ((Lease(kind="edge", name="e1", epoch=1, stalled=True),), "edge e1 cannot write to its log"),
    ],
)
async def test_what_is_known_of_the_edge(lease: tuple[Lease, ...], fact: str) -> None:
    made = await fleet_of()
    open_ = folded(at(0, accepted()), at(1, ROUTED))
    [one] = stuck_requests(open_.open.values(), around(made, leases=(*lease, *LEASES[1:])), QUIET)
    assert one.facts[0].startswith(fact)
    [one] = stuck_requests(open_.open.values(), around(made, leases=None), QUIET)
    assert one.facts == ()


def test_marks_of_edges_are_kept() -> None:
    """The newest of each."""
    found = folded(at(0, RequestsOpen(5)), at(1, RequestsOpen(-1), edge="e2"), at(2, RequestsOpen(7)))
    assert found.since == {"e1": 7, "e2": -1}
