"""Workers of several speeds, and workers that turn slow: the settings, and steps that take as long as the speed says."""

import pytest

from headwater.engines.sim import StepTime
from headwater.ops.bench.trace import Trace, TraceRequest
from headwater.ops.config.setting import ConfigError
from headwater.ops.whatif.report import as_data, as_table, report_of
from headwater.ops.whatif.run import RunResult, run
from headwater.ops.whatif.setup import (
    Setup,
    Slowdown,
    SpeedProfile,
    profile_of,
    read_slowdowns,
    read_speeds,
    write_slowdowns,
    write_speeds,
)

STEPS = StepTime((0.0, 0.0, 10.0), (0.0, 0.0, 10.0))
"""10 ms for a prompt, and 10 for its first token or for a further one."""


def one_run(setup: Setup, count: int = 1) -> RunResult:
    """Requests of 100 tokens and 11 of answer, one second after the other, in turn over the workers."""
    requests = tuple(
        TraceRequest(f"r{number}", number * 1_000_000_000, 100, 11, (number,)) for number in range(count)
    )
    return run(Trace("few", requests), setup)


def times_ms(ran: RunResult) -> list[tuple[float, float]]:
    """To the first token and to the last, from the arrival of each request."""
    return [
        ((one.first_ns - one.request.arrival_ns) / 1e6, (one.done_ns - one.request.arrival_ns) / 1e6)
        for one in ran.served
    ]


def test_steps_take_as_long_as_the_speed_says() -> None:
    """The second worker has half the speed, the third is the first of the next turn."""
    setup = Setup(policy="round_robin", workers=3, step_time=STEPS, worker_speeds=(1.0, 0.5))
    ran = one_run(setup, 3)
    found = dict(zip([one.worker for one in ran.served], times_ms(ran), strict=True))
    assert found == {"w000": (20, 120), "w001": (40, 240), "w002": (20, 120)}


def test_a_worker_turns_slow_at_its_time() -> None:
    """At 50 ms it has 3 of 10 further tokens; each later step takes 30 ms, until the factor is 1 again."""
    slow = (Slowdown("w000", 0.05, 3.0), Slowdown("w000", 0.12, 1.0))
    setup = Setup(policy="round_robin", workers=1, step_time=STEPS, slowdowns=slow)
    # Steps of 10 ms begin before 50; at 50, 80 and 110 begin steps of 30; four more of 10 from 140.
    assert times_ms(one_run(setup)) == [(20, 180)]


def test_a_step_has_the_speed_of_its_beginning() -> None:
    """The one that begins at 40 takes 10 ms, though the worker turns slow at 45."""
    slow = (Slowdown("w000", 0.045, 3.0),)
    setup = Setup(policy="round_robin", workers=1, step_time=STEPS, slowdowns=slow)
    assert times_ms(one_run(setup)) == [(20, 50 + 7 * 30)]


def test_steps_until_a_change() -> None:
    """Those that begin before it."""
    profile = profile_of("a", 2.0, (Slowdown("b", 0.0, 9.0), Slowdown("a", 1e-6, 4.0)))
    assert profile == SpeedProfile(2.0, ((1_000, 0.5),))
    assert [profile.at(now) for now in (999, 1_000)] == [2.0, 0.5]
    assert [profile.steps_until_change(now, 300, 9) for now in (0, 100, 999, 1_000)] == [4, 3, 1, 9]


def test_settings_are_written_as_they_are_read() -> None:
    """And shown in the table and in JSON."""
    assert read_speeds("1,0.5") == (1.0, 0.5)
    assert write_speeds((1.0, 0.5)) == "1,0.5"
    slowdowns = read_slowdowns("w000@60=4, w001@7.5=1")
    assert slowdowns == (Slowdown("w000", 60.0, 4.0), Slowdown("w001", 7.5, 1.0))
    assert write_slowdowns(slowdowns) == "w000@60=4,w001@7.5=1"
    assert read_slowdowns("") == ()
    reports = [
        report_of(one_run(Setup(workers=2, worker_speeds=(1.0, 0.5), slowdowns=slowdowns))),
        report_of(one_run(Setup(workers=2))),
    ]
    shown = as_table(reports)
    assert "1,0.5" in shown
    assert "w000@60=4,w001@7.5=1" in shown
    # There were none.
    assert "items of media" not in shown
    assert as_data(reports[0])["setup"]["slowdowns"][0] == {"worker": "w000", "at_s": 60.0, "factor": 4.0}


@pytest.mark.parametrize("text", ["w000", "w000@60", "w000@x=2", "@60=2", "w000@-1=2", "w000@60=0"])
def test_a_wrong_slowdown_is_refused(text: str) -> None:
    """With the notation."""
    with pytest.raises(ValueError, match=r"WORKER@SECONDS=FACTOR"):
        read_slowdowns(text)


def test_speeds_are_above_zero_and_slowdowns_are_of_the_fleet() -> None:
    """Errors before the run."""
    with pytest.raises(ValueError, match="greater than 0"):
        read_speeds("1,0")
    with pytest.raises(
        ConfigError, match=r"--slowdowns w007@1=2: .* no worker w007; its workers are w000 to d000"
    ):
        one_run(Setup(workers=2, decode_workers=1, slowdowns=(Slowdown("w007", 1.0, 2.0),)))
