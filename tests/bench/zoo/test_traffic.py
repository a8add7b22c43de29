"""The zoo's traffic: how much each class shares, simulated rates against the named share of a fleet, and trace files."""

import statistics
from pathlib import Path

import pytest

from headwater.engines.sim import StepTime
from headwater.ops.bench.trace import TRACE_BLOCK, read, write
from headwater.ops.whatif.run import run
from headwater.ops.whatif.setup import Setup
from tests.bench.zoo.load import LOADS, demand_of, requests_per_s, trace_at
from tests.bench.zoo.traffic import CLASSES, Arrival, generate

pytestmark = pytest.mark.soak
"""They test tools of ours."""


def reuse_of(found: list[Arrival]) -> float:
    """The share of full blocks that an earlier prompt had."""
    seen: set[int] = set()
    shared = total = 0
    for one in found:
        full = one.ids[: one.prompt_tokens // TRACE_BLOCK]
        shared += sum(block in seen for block in full)
        total += len(full)
        seen.update(full)
    return shared / total


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("agents", 0.8, 1.0),
        ("chat", 0.4, 0.9),
        ("code", 0.7, 1.0),
        ("cold", 0.0, 0.0),
        ("documents", 0.5, 0.95),
        ("hot", 0.7, 0.95),
        ("long_context", 0.1, 0.4),
        ("prefill_decode", 0.3, 0.7),
        ("shifting", 0.6, 0.95),
        ("single_turn", 0.0, 0.0),
        ("slow_worker", 0.8, 1.0),
        ("tenants", 0.5, 0.95),
        ("two_speeds", 0.4, 0.9),
    ],
)
def test_prefixes_are_shared_as_the_class_says(name: str, low: float, high: float) -> None:
    """With unlimited caches."""
    assert low <= reuse_of(generate(name, 900, 1)) <= high


def test_hot_traffic_has_three_prefixes() -> None:
    """85 % of the requests begin with one of them, of 32 blocks."""
    found = generate("hot", 900, 1)
    firsts = [one.ids[31] for one in found if len(one.ids) > 31]
    hottest = sorted({first for first in firsts if firsts.count(first) > 10}, key=firsts.count)
    assert len(hottest) == 3
    assert sum(map(firsts.count, hottest)) / len(found) == pytest.approx(0.85, abs=0.04)


def test_what_is_popular_shifts() -> None:
    """The ten prefixes of one eighth of the requests are not those of the next."""
    found = generate("shifting", 800, 1)
    eighths = [[one.ids[0] for one in found[start : start + 100]] for start in (0, 100)]
    popular = [{first for first in part if part.count(first) > 3} for part in eighths]
    assert all(popular)
    assert not popular[0] & popular[1]


@pytest.mark.parametrize("load", ["light", "medium"])
def test_the_rate_uses_the_named_share(load: str) -> None:
    """Of one worker's blocks, measured in a simulation, by Little's law: over the time of the run."""
    step_time, blocks = StepTime(), 1_000
    arrivals = generate("single_turn", 600, 1)
    rate = requests_per_s(demand_of(arrivals, step_time), blocks, LOADS[load], step_time)
    ran = run(trace_at("single_turn", arrivals, rate), Setup(policy="round_robin", workers=1, blocks=blocks))
    span = ran.served[-1].request.arrival_ns
    together = sum(one.done_ns - one.began_ns for one in ran.served) / span
    assert together == pytest.approx(LOADS[load] * 256, rel=0.25)


def test_loads_are_rates_in_the_same_order() -> None:
    """For every class, and for two workers' worth of blocks."""
    step_time = StepTime()
    for name in CLASSES:
        demand = demand_of(generate(name, 100, 1), step_time)
        rates = [requests_per_s(demand, 2_000, share, step_time) for share in LOADS.values()]
        assert rates == sorted(rates)
        assert rates[0] > 0


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Without sessions, at the rate asked for."""
    arrivals = generate("agents", 100, 1)
    trace = trace_at("agents", arrivals, 5.0)
    write(tmp_path / "agents.jsonl", trace)
    again = read(tmp_path / "agents.jsonl").requests
    assert again == tuple(one._replace(session="") for one in trace.requests)
    assert b"session" not in (tmp_path / "agents.jsonl").read_bytes()
    assert len(again) / again[-1].arrival_ns * 1e9 == pytest.approx(5.0, rel=0.01)
    assert statistics.fmean(one.output_tokens for one in again) > 1
