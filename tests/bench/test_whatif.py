"""`python -m tests.bench whatif`: the trace that travels with the code, the peer's rows, and what falls short."""

import gzip
import hashlib
import json

import pytest

from headwater.ops.bench.trace import read
from tests.bench import whatif
from tests.bench.whatif_peer import ROWS, TARGETS_ROW

pytestmark = pytest.mark.soak
"""They test tools of ours."""


def test_the_trace_is_the_public_one() -> None:
    """As its README says."""
    data = gzip.decompress(whatif.TRACE.read_bytes())
    assert (
        hashlib.sha256(data).hexdigest() == "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df"
    )
    assert len(read(whatif.TRACE).requests) == 12_031


def test_every_setting_of_the_peer_is_there_with_and_without_a_router() -> None:
    """The second row is the one with targets of its own."""
    pairs = {(row.workers, row.blocks, row.speed) for row in ROWS}
    assert len(ROWS) == 2 * len(pairs) == 8
    assert (TARGETS_ROW.policy, TARGETS_ROW.workers, TARGETS_ROW.blocks, TARGETS_ROW.speed) == (
        "kv",
        8,
        4_000,
        1,
    )


def test_a_row_is_ours_beside_theirs(capsys: pytest.CaptureFixture[str]) -> None:
    """On a few requests: figures, ratios, bounds and what is missed, as a table and as JSON."""
    found = whatif.bench(ROWS[:4], requests=150)
    robin, kv, *_ = found.rows
    for row in (robin, kv):
        assert row.ratio["ttft_mean"] == pytest.approx(row.ours["ttft_mean"] / row.theirs["ttft_mean"])
    for row in found.rows:
        # Those of the same requests at the same speed: no policy is below them.
        assert row.bounds.requests == 150
        assert row.ours["ttft_mean"] >= row.bounds.queueing.ttft_mean > 0
        assert row.ours["e2e_mean"] >= row.bounds.queueing.e2e_mean > 0
    robins = [row.ratio for row in found.rows if row.policy == "round_robin"]
    assert found.furthest == max(abs(ratio - 1) for ratios in robins for ratio in ratios.values())
    # So few requests reuse less than all do, whatever the policy.
    assert any("reuse" in one and "at least 0.32" in one for one in found.missed)
    whatif.show(found, as_json=False)
    text = capsys.readouterr().out
    assert "DO NOT AGREE" in text
    assert f"{kv.ours['e2e_mean']:,.0f} ({kv.ratio['e2e_mean']:.3f})" in text
    assert f"{kv.ours['ttft_mean'] / kv.bounds.unlimited.ttft_mean:.3f}" in text
    whatif.show(found, as_json=True)
    assert json.loads(capsys.readouterr().out)["missed"] == found.missed
