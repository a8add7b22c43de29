"""`python -m tests.bench signal-age` and `replicas`: what is compared with what, what is missed, and the output."""

import json

import msgspec
import pytest

from headwater.ops.bench.trace import Trace, TraceRequest
from headwater.ops.whatif.setup import Setup
from tests.bench.staleness import replicas, signal_age

pytestmark = pytest.mark.soak
"""They test tools of ours."""

FLEET = Setup(workers=6, blocks=1_000, router_delay_ms=200.0, agreement=True)


def test_a_row_is_compared_with_the_one_without_delay(capsys: pytest.CaptureFixture[str]) -> None:
    """With and without credit, over two seeds; what costs too much with credit is named."""
    found = signal_age.bench(("hot",), (0.0, 250.0), requests=60, seeds=(1, 2))
    assert [(row.credit, row.delay_ms) for row in found.rows] == [
        (credit, delay) for credit in ("on", "off") for delay in (0.0, 250.0)
    ]
    for base, late in (found.rows[:2], found.rows[2:]):
        assert set(base.ratio.values()) == {1.0}
        assert set(base.error.values()) == {0.0}
        for name in signal_age.FIGURES:
            assert late.ratio[name] == pytest.approx(late.figures[name] / base.figures[name])
        assert late.error["ttft_mean"] > 0
        # Requests that come together share a prefix, which nobody has announced yet.
        assert late.ratio["ttft_mean"] != 1
    signal_age.show(found, as_json=False)
    text = capsys.readouterr().out
    row = found.rows[1]
    assert f"{row.figures['e2e_mean']:,.0f} ({row.ratio['e2e_mean']:.3f})" in text
    signal_age.show(found, as_json=True)
    assert json.loads(capsys.readouterr().out)["rows"][1]["delay_ms"] == 250


def test_only_what_costs_too_much_with_credit_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can cost less than nothing, so with a bound of 0 all of the delayed row is missed, and only of that one."""
    monkeypatch.setattr(signal_age, "WORSE_MAX", 0.0)
    found = signal_age.bench(("hot",), (0.0, 250.0), requests=30, seeds=(1,))
    assert len(found.missed) == len(signal_age.TARGETS)
    assert all(one.startswith("hot, 250 ms") for one in found.missed)


def test_more_routers_are_compared_with_the_first_row(capsys: pytest.CaptureFixture[str]) -> None:
    """With one router only events of workers are late; with two also decisions, at most those of one delay."""
    found = replicas.bench((1, 2), requests=150, fleet=FLEET)
    one, two = found.rows
    assert (one.routers, one.ratio, one.unseen_max) == (1, 1.0, 0)
    assert two.ratio == pytest.approx(two.hit_share / one.hit_share)
    assert 0 < two.unseen <= two.unseen_max <= found.bound
    assert 0 < two.different < 1
    assert found.returned.state_equal
    assert found.returned.decisions > 10
    assert found.returned.different == 0
    replicas.show(found, as_json=False)
    text = capsys.readouterr().out
    assert f"{two.different:.2%}" in text
    assert "0 of its" in text
    replicas.show(found, as_json=True)
    assert json.loads(capsys.readouterr().out)["bound"] == found.bound


def test_what_falls_short_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hit share, and a bound that does not hold."""
    monkeypatch.setattr(replicas, "HIT_SHARE_MIN", 2.0)
    monkeypatch.setattr(replicas, "most_within", lambda *_: 0)
    found = replicas.bench((1, 2), requests=50, fleet=FLEET)
    assert [one.partition(":")[0] for one in found.missed] == ["1 routers", "2 routers", "2 routers"]


def test_the_bound_is_the_busiest_delay() -> None:
    """Requests at 0, 1, 5, 6 and 7: three within 2."""
    one = TraceRequest("r", 0, 1, 1, (1,))
    trace = Trace("t", tuple(one._replace(arrival_ns=at) for at in (0, 1, 5, 6, 7)))
    assert [replicas.most_within(trace, delay) for delay in (0, 1, 2, 7)] == [1, 2, 3, 5]
    assert msgspec.structs.replace(FLEET, routers=3).router_delays_ns[-1] == 200_000_000
