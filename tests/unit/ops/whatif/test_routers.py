"""Several routers and delayed events on virtual time: what is seen when, credit, agreement, and a router's return."""

from typing import Any

import pytest

from headwater.ops.bench.trace import TRACE_BLOCK, Trace, TraceRequest
from headwater.ops.whatif.command import columns
from headwater.ops.whatif.report import report_of
from headwater.ops.whatif.routing import NEVER, VirtualLog
from headwater.ops.whatif.run import RunResult, run
from headwater.ops.whatif.setup import Setup
from headwater.schemas.events import RequestsHeld
from tests.support.data.whatif_traces import conversations
from tests.support.processes.line import arguments

MS = 1_000_000
HELD = RequestsHeld(())
SPREAD = conversations(5, 150, gap_ms=40)


def same_prompts(*at_ms: int, output: int = 100) -> Trace:
    """Requests for one prompt of 16 blocks."""
    ids = (*range(16), 99)
    tokens = 16 * TRACE_BLOCK + 1
    return Trace(
        "same",
        tuple(TraceRequest(f"r{n}", at * MS, tokens, output, ids) for n, at in enumerate(at_ms)),
    )


def after_others(trace: Trace) -> Trace:
    """The trace, after prompts from which the router learns the time of a step."""
    first = tuple(
        TraceRequest(f"first{n}", n * 1_000 * MS, n * 512 + 1, 1, tuple(range(1_000 * n, 1_001 * n + 1)))
        for n in range(1, 17)
    )
    later = tuple(one._replace(arrival_ns=one.arrival_ns + 20_000 * MS) for one in trace.requests)
    return Trace(trace.name, first + later)


def hits(trace: Trace, **settings: Any) -> list[int]:
    """Cached blocks of the requests for one prompt, by name, with two workers."""
    served = [one for one in run(trace, Setup(workers=2, **settings)).served if one.request.name[0] == "r"]
    return [one.hit_blocks for one in sorted(served, key=lambda one: one.request.name)]


def several(**settings: Any) -> RunResult:
    """A run of bursts over four routers."""
    return run(SPREAD, Setup(workers=6, blocks=200, routers=4, agreement=True, **settings))


def test_a_message_is_read_after_both_delays_and_in_order() -> None:
    """A worker's is stored after the log's delay, a router's at once; each is readable after the reader's delay."""
    log = VirtualLog(delay_ns=100)
    near, far = log.reader(0), log.reader(30)
    log.send("w", 1_000, HELD)
    log.store_arrived(1_099)
    assert near.take(1_099) is None
    assert (log.readable_ns(near), log.readable_ns(far)) == (1_100, 1_130)
    log.append("router", 1_110, HELD)
    first, second = near.take(1_110), near.take(1_110)
    assert first is not None
    assert second is not None
    assert (first.position, first.stored_ns, first.batch.wall_ns) == (1, 1_100, 1_000)
    assert (second.position, second.stored_ns, second.batch.writer) == (2, 1_110, "router")
    copy = log.copy(far)
    assert far.take(1_129) is None
    assert far.take(1_130) == copy.take(1_130) == first
    assert copy.take(1_130) is None
    assert far.take(1_140) == second
    assert log.readable_ns(far) == NEVER


def test_delayed_events_hide_a_prefix_and_credit_shows_it() -> None:
    """The first request still decodes when the second comes: its blocks are announced late, but its decision is known."""
    trace = after_others(same_prompts(0, 600))
    assert hits(trace, credit="off") == [0, 16]
    assert hits(trace, credit="off", event_delay_ms=500.0) == [0, 0]
    assert hits(trace, credit="on", event_delay_ms=500.0) == [0, 16]
    # Once its events have arrived the credit makes no difference.
    assert hits(after_others(same_prompts(0, 1_200)), credit="off", event_delay_ms=500.0) == [0, 16]


def test_a_decision_of_another_router_counts_once_it_is_read() -> None:
    """Five queries at once over four routers: those that see none of the others choose the same worker."""
    trace = Trace("burst", same_prompts(0, 0, 0, 0, 0, 0, 0, 0).requests)
    together, apart = (
        run(trace, Setup(workers=8, routers=4, agreement=True, router_delay_ms=delay)) for delay in (0.0, 5.0)
    )
    for ran, unseen in ((together, 0), (apart, 7)):
        agreement = ran.routers.agreement
        assert agreement is not None
        assert agreement.decisions == 8
        assert agreement.unseen_max <= unseen
        assert bool(agreement.unseen_total) == bool(agreement.different) == bool(unseen)


@pytest.mark.parametrize("settings", [{}, {"event_delay_ms": 200.0}, {"credit": "off"}])
def test_all_routers_end_with_one_state(settings: dict[str, Any]) -> None:
    """They fold one log, whatever their delays; and they decide as a single one where there is none."""
    ran = several(router_delay_ms=8.0, **settings)
    digests = [router.state.digest() for router in ran.routers.each]
    assert digests == [ran.routers.state.digest()] * 4
    agreement, again = ran.routers.agreement, several(router_delay_ms=8.0, **settings)
    assert agreement is not None
    assert agreement.decisions == len(ran.served) == 150
    assert 0 < agreement.different < 150
    assert report_of(ran).digest == report_of(again).digest
    without = several(**settings).routers.agreement
    assert without is not None
    # Events of workers that are on their way reach nobody, a single router neither.
    assert without.different == without.unseen_total == 0


def test_every_router_has_its_share_of_the_requests() -> None:
    """Each at least an eighth of them, and together all; with one router its state is the run's."""
    routers = several(router_delay_ms=8.0).routers
    assert routers.decisions == 150
    shares = [router.decisions for router in routers.each]
    assert min(shares) > 150 / 8
    assert sum(shares) == 150


@pytest.mark.parametrize("delays", [(300.0, 0.0), (0.0, 300.0)])
def test_queries_in_a_queue_are_served_when_the_delayed_report_is_read(delays: tuple[float, float]) -> None:
    """Nothing else happens in the fleet meanwhile, so the message itself must wake the queue."""
    setup = Setup(workers=1, busy_prefill_tokens=1, event_delay_ms=delays[0], router_delay_ms=delays[1])
    ran = run(same_prompts(0, 0, 0, output=2), setup)
    assert len(ran.served) == 3
    first, second, _ = sorted(ran.served, key=lambda one: one.given_ns)
    assert second.given_ns == first.first_ns + 300 * MS


@pytest.mark.parametrize("credit", ["on", "off"])
def test_a_router_that_returns_decides_as_if_it_had_never_died(credit: str) -> None:
    """From a snapshot and the log it has the state of its twin, and each later decision is its twin's, in every cost."""
    ran = several(router_delay_ms=8.0, restart_s=0.4, credit=credit)
    restart = ran.routers.restart
    assert restart is not None
    assert restart.returned
    assert restart.states_equal
    assert restart.decisions > 5
    assert restart.different == 0
    assert len(ran.served) == 150


def test_the_settings_are_options() -> None:
    """One column each, and the defaults are today's router: one, without delay."""
    words = ["whatif", "t", "--event-delay-ms", "250", "--credit", "off", "--credit", "on", "--routers", "4"]
    found = columns(arguments([*words, "--router-delay-ms", "5"])["values"])
    assert [one.credit for one in found] == ["off", "on"]
    assert {one.event_delay_ms for one in found} == {250.0}
    assert found[0].event_delay_ns == 250 * MS
    assert found[0].router_delays_ns == (1_250_000, 2_500_000, 3_750_000, 5 * MS)
    default = Setup()
    assert (default.event_delay_ns, default.router_delays_ns, default.credit) == (0, (0,), "on")
