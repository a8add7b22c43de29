"""Which worker the host of forks starts again, and when it gives all of them up."""

import pytest

from headwater.actors.runtime.actor import DEFAULT_POLICY, Backoff
from headwater.ops.config.processes import EngineProcess
from headwater.ops.start.actor import EXIT_UNRECOVERABLE
from headwater.ops.start.forks import _Host

STEADY_S = DEFAULT_POLICY.steady_s


def host(**running_s: float) -> _Host:
    """A host whose other workers have been running for so long, at time 1000. None of its own is a process."""
    made = _Host(EngineProcess(), [])
    made._started_s = {name: 1000.0 - seconds for name, seconds in running_s.items()}
    made._pids = dict(enumerate(running_s, 1))
    made._backoff = {"bad": Backoff(DEFAULT_POLICY)}
    return made


def delays(made: _Host, code: int = 1, ran_s: float = 0.5) -> list[float | None]:
    """What follows on twelve ends, a second apart."""
    found = []
    for number in range(12):
        made._started_s["bad"] = 1000.0 + number - ran_s
        found.append(made._delay_s("bad", code, 1000.0 + number))
    return found


@pytest.mark.parametrize(("other_s", "last"), [(1.0, None), (STEADY_S, DEFAULT_POLICY.kept_delay_s)])
def test_worker_that_fails_often_is_kept_only_beside_one_that_runs_steadily(
    other_s: float, last: float | None
) -> None:
    found = delays(host(other=other_s))
    assert found[-1] == last
    assert None not in found[:10]


def test_worker_that_ran_for_long_once_is_kept_alone() -> None:
    """What ends it may be requests."""
    made = host()
    made._started_s["bad"] = 0.0
    assert made._delay_s("bad", 1, STEADY_S) is not None
    assert delays(made)[-1] == DEFAULT_POLICY.kept_delay_s


def test_worker_that_cannot_start_is_not_started_again() -> None:
    assert delays(host(other=STEADY_S), EXIT_UNRECOVERABLE) == [None] * 12
