"""The figures of the hand-off benchmark, from answers and from SGLang's metrics."""

import pytest

from tests.bench.gpu.handoff.fleet import FIGURE, EngineFigures, HandoffAnswer, HandoffRepeat, row
from tests.bench.gpu.load import Sample

pytestmark = pytest.mark.soak
"""They test tools of ours."""


def answer(first_s: float, text: str, cached: int = 0) -> HandoffAnswer:
    """An answer of two tokens."""
    return HandoffAnswer(Sample(first_s, first_s + 1.0, 2), text, cached)


def repeat(first_s: float, text: str, *, together: str = "a") -> HandoffRepeat:
    """One prompt: the cached answers take half as long, those without a hand-off a tenth less."""
    return HandoffRepeat(
        answer(first_s, text),
        answer(first_s / 2, text, 90),
        answer(first_s * 0.9, together),
        answer(first_s * 0.45, together),
        EngineFigures(1, 4.0, first_s * 100, 2.0),
    )


def test_medians_and_equal_answers_of_a_length() -> None:
    found = row(100, [repeat(0.1, "a"), repeat(0.3, "b"), repeat(0.2, "a")])
    assert (found.tokens, found.repeats, found.equal, found.cached) == (100, 3, 2, 90)
    times = (found.new_ms, found.new_together_ms, found.cached_ms, found.cached_together_ms)
    assert [round(value, 6) for value in times] == [200.0, 180.0, 100.0, 90.0]
    assert (found.mib, found.gib_s, round(found.transfer_ms, 6)) == (4.0, 2.0, 20.0)


def test_sums_and_counts_of_the_metrics_are_found_with_labels_and_without() -> None:
    text = (
        "# HELP sglang:kv_transfer_latency_ms x\n"
        'sglang:kv_transfer_latency_ms_sum{engine_type="prefill",model_name="m"} 12.5\n'
        'sglang:kv_transfer_latency_ms_count{model_name="m"} 3.0\n'
        'sglang:kv_transfer_latency_ms_bucket{le="1.0"} 2.0\n'
        "sglang:kv_transfer_total_mb_sum 1e+03\n"
    )
    assert FIGURE.findall(text) == [
        ("latency_ms", "sum", "12.5"),
        ("latency_ms", "count", "3.0"),
        ("total_mb", "sum", "1e+03"),
    ]
