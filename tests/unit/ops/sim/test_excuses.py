"""Which faults excuse a failed request of the simulation: each kind's reach, and that everything else is reported."""

import itertools
from typing import Any, get_args

import pytest

from headwater.ops.sim.checks import ANSWER_S, DOWN, LOG, MESSAGES, RECOVERY_S, unexplained
from headwater.ops.sim.clients import ClientEvent
from headwater.ops.sim.faults import Fault, Kind

NEVER = 1e9
"""The fleet is not healthy again within the run."""

FAILURES = ("error", "refused", "reset")
EXCUSING = DOWN | MESSAGES
NEIGHBOURS = ("engine-0", "router-0")
A_BIT = 0.001


def failed(
    at_s: float, ended_s: float, end: Any = "error", *, edge: str = "edge-0", **more: Any
) -> ClientEvent:
    """A request that ended badly."""
    return ClientEvent(1, edge, at_s, 10, 7, True, end=end, ended_s=ended_s, status=502, **more)


def excused(told: ClientEvent, *faults: Fault, healthy_s: float = NEVER) -> bool:
    """Is there an explanation?"""
    return not unexplained([told], list(faults), healthy_s)


def test_a_failure_without_a_fault_is_reported() -> None:
    """With everything that helps to find it."""
    one = failed(3.25, 4.5, reason="moved 5 times; last: it was started again")
    [problem] = unexplained([one], [], NEVER)
    assert problem == (
        "client 1 (edge edge-0, 3.250 to 4.500 s): error, HTTP 502, not explained by a fault: "
        "moved 5 times; last: it was started again"
    )
    [problem] = unexplained([failed(3.25, 4.5)], [], NEVER)
    assert problem.endswith("no reason given")


@pytest.mark.parametrize("end", ["stop", "hung up", "open", "hangs"])
def test_what_is_no_failure_needs_no_excuse(end: Any) -> None:
    """Other invariants look at these."""
    assert unexplained([failed(1.0, 2.0, end)], [], NEVER) == []


def test_a_refusal_by_a_limit_of_the_run_needs_no_excuse() -> None:
    """A queue's bound or a deadline is meant to refuse."""
    assert unexplained([failed(1.0, 2.0, "refused", limited=True)], [], NEVER) == []
    assert len(unexplained([failed(1.0, 2.0, "refused")], [], NEVER)) == 1


def test_each_failure_needs_an_excuse_of_its_own() -> None:
    """One that is excused does not hide another."""
    told = [failed(1.0, 2.0), failed(60.0, 61.0, edge="edge-1"), failed(1.5, 1.9)]
    crash = Fault("crash", 1.2, 1.0, "engine-0")
    [problem] = unexplained(told, [crash], NEVER)
    assert "edge edge-1" in problem


@pytest.mark.parametrize("kind", sorted(set(get_args(Kind)) - EXCUSING))
@pytest.mark.parametrize("target", ["", "edge-0", "engine-0", "router-0"])
@pytest.mark.parametrize("end", FAILURES)
def test_what_only_the_log_or_the_leases_suffer_from_excuses_nothing(
    kind: Kind, target: str, end: Any
) -> None:
    """Tokens do not pass them. This is the invariant that finds an edge which loses requests with a lease."""
    assert not excused(failed(10.0, 20.0, end), Fault(kind, 12.0, 5.0, target, 1.0))


def test_all_faults_of_the_log_together_excuse_nothing() -> None:
    """Without anybody who was down."""
    faults = [Fault(kind, 12.0, 5.0) for kind in sorted(LOG)]
    faults += [Fault("leases_lost", 12.0), Fault("lease_loss", 12.0, 0.0, "engine-0")]
    assert not excused(failed(10.0, 20.0), *faults)


@pytest.mark.parametrize("kind", sorted(EXCUSING))
def test_a_fault_excuses_nothing_that_ended_before_it(kind: Kind) -> None:
    """Up to the moment where it begins."""
    fault = Fault(kind, 10.0, 2.0, "engine-0" if kind in DOWN else "", 0.5)
    assert not excused(failed(5.0, 10.0 - A_BIT), fault)
    assert excused(failed(5.0, 10.0), fault)
    assert excused(failed(11.0, 11.5), fault)


@pytest.mark.parametrize("kind", sorted(MESSAGES))
def test_lost_and_late_messages_reach_to_the_recovery_after_them(kind: Kind) -> None:
    """They excuse an error and a refusal, never a broken connection: clients' connections are not theirs."""
    fault = Fault(kind, 10.0, 2.0, amount=0.5)
    for end in ("error", "refused"):
        assert excused(failed(12.0 + RECOVERY_S, 30.0, end), fault)
        assert not excused(failed(12.0 + RECOVERY_S + A_BIT, 30.0, end), fault)
    assert not excused(failed(11.0, 11.5, "reset"), fault)


@pytest.mark.parametrize("kind", sorted(DOWN))
def test_who_was_down_excuses_until_it_has_recovered(kind: Kind) -> None:
    """A fault of a worker or a router, for requests of any edge that began in its reach."""
    for target in NEIGHBOURS:
        fault = Fault(kind, 10.0, 2.0, target)
        for end, edge in itertools.product(("error", "refused"), ("edge-0", "edge-1")):
            assert excused(failed(12.0 + RECOVERY_S, 30.0, end, edge=edge), fault)
            assert not excused(failed(12.0 + RECOVERY_S + A_BIT, 30.0, end, edge=edge), fault)


@pytest.mark.parametrize("kind", sorted(DOWN))
def test_only_its_own_edge_breaks_a_connection(kind: Kind) -> None:
    """A reset is excused by the edge that the client spoke to, and by nobody else."""
    for target in NEIGHBOURS:
        assert not excused(failed(10.5, 11.0, "reset"), Fault(kind, 10.0, 2.0, target))
    for end in FAILURES:
        assert excused(failed(10.5, 11.0, end), Fault(kind, 10.0, 2.0, "edge-0"))
        assert not excused(failed(10.5, 11.0, end), Fault(kind, 10.0, 2.0, "edge-1"))


@pytest.mark.parametrize("kind", sorted(LOG))
def test_a_log_that_is_away_prolongs_a_recovery(kind: Kind) -> None:
    """Of somebody who was down at that time, or not back yet: whoever starts needs the log."""
    crash = Fault("crash", 10.0, 2.0, "engine-0")
    late = failed(26.0, 30.0)
    assert not excused(late, crash)
    for at_s in (8.0, 11.0, 12.0 + RECOVERY_S):
        log = Fault(kind, at_s, 20.0 - at_s)
        until = 20.0 + RECOVERY_S + ANSWER_S
        assert excused(late, crash, log)
        assert excused(failed(until, until + 1), crash, log)
        assert not excused(failed(until + A_BIT, until + 1), crash, log)
    assert not excused(late, crash, Fault(kind, 5.0, 5.0 - A_BIT)), "it was back before the crash"
    assert not excused(late, crash, Fault(kind, 12.0 + RECOVERY_S + A_BIT, 3.0)), "it went after the recovery"


def test_faults_that_meet_prolong_each_other() -> None:
    """A second crash within the recovery, then a log that is away within that of both."""
    faults = [
        Fault("crash", 10.0, 2.0, "engine-0"),
        Fault("pause", 16.0, 2.0, "engine-0"),
        Fault("log_unavailable", 27.0, 3.0),
    ]
    until = 30.0 + RECOVERY_S + ANSWER_S
    for order in itertools.permutations(faults):
        assert excused(failed(until, 60.0), *order)
        assert not excused(failed(until + A_BIT, 60.0), *order)


def test_somebody_else_who_is_down_does_not_prolong_a_recovery() -> None:
    """Each process recovers by itself."""
    faults = [Fault("crash", 10.0, 2.0, "edge-0"), Fault("crash", 14.0, 10.0, "edge-1")]
    assert not excused(failed(25.0, 26.0), *faults)
    assert excused(failed(25.0, 26.0, edge="edge-1"), *faults)


@pytest.mark.parametrize("kind", sorted(EXCUSING))
def test_nothing_is_excused_once_the_fleet_is_healthy(kind: Kind) -> None:
    """Every request after that succeeds, whatever was shortly before."""
    fault = Fault(kind, 10.0, 2.0, "edge-0" if kind in DOWN else "", 0.5)
    assert excused(failed(13.0, 14.0), fault, healthy_s=13.0)
    assert not excused(failed(13.0 + A_BIT, 14.0), fault, healthy_s=13.0)
