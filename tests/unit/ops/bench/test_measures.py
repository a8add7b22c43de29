"""Figures of a run, and the loops that make one."""

import asyncio
from array import array
from random import Random

import pytest

from headwater.ops.bench.client import Failure, StreamedAnswer, Usage
from headwater.ops.bench.figures import PointReport, best_point, report_of
from headwater.ops.bench.generator import Generator, LoadRun, OwnLag, Pace, Sample, due_times
from headwater.ops.bench.options import read_limits
from headwater.ops.bench.workload import Conversation, Turn, Workload

IDLE = OwnLag(0.1, 1.0, 2.0)
CLOSED = Pace(at_once=1)


def sample(
    number: int,
    *,
    sent: float = 0.0,
    first: float = 0.1,
    last: float = 1.1,
    output: int = 11,
    due: float = 0.0,
    held: float = 0.0,
    gaps: tuple[float, ...] = (100.0,) * 10,
    failure: Failure | None = None,
    cached: int = -1,
) -> Sample:
    return Sample(number, 0, due, sent, held, first, last, 20, 11, 20, output, cached, True, gaps, failure)


def figures(
    *samples: Sample,
    pace: Pace = CLOSED,
    own: OwnLag = IDLE,
    limits: str = "",
    duration_s: float = 2.0,
) -> PointReport:
    return report_of("w", LoadRun(list(samples), duration_s, own, 0.0), pace, read_limits(limits))


def test_figures_are_as_defined() -> None:
    """First token, mean time per token after the first, last token; failed requests count for none of them."""
    found = figures(
        sample(0),
        sample(1, sent=0.5, first=0.8, last=0.8, output=1, gaps=()),
        sample(2, failure=Failure("HTTP 503", "full")),
    )
    assert found.ttft_ms is not None
    assert found.itl_ms is not None
    assert found.e2e_ms is not None
    assert (found.ttft_ms.mean, found.ttft_ms.max) == pytest.approx((200, 300))
    # The answer of one token has no time between two.
    assert (found.itl_ms.mean, found.itl_ms.p99) == pytest.approx((100, 100))
    assert found.e2e_ms.mean == pytest.approx(700)
    assert (found.requests, found.failed, found.failures) == (3, 1, {"HTTP 503": 1})
    assert found.messages == {"HTTP 503": "full"}
    assert (found.requests_per_s, found.output_tokens_per_s, found.total_tokens_per_s) == (1, 6, 26)
    assert (found.short_answers, found.cached_share) == (1, None)
    assert found.mean_in_flight == pytest.approx(0.7)


def test_goodput_counts_what_is_within_all_limits() -> None:
    """Failed requests are beyond them; a mean does not show a stall, which `gap` does."""
    stalled = sample(1, gaps=(10.0,) * 9 + (910.0,))
    all_in = (sample(0), stalled, sample(2, first=0.4), sample(3, failure=Failure("timeout")))
    good = figures(*all_in, limits="ttft=200ms,itl=100.1ms").goodput
    assert good is not None
    assert (good.requests, good.share, good.requests_per_s) == (2, 0.5, 1)
    assert good.missed == {"ttft": 1, "itl": 0}
    strict = figures(*all_in, limits="ttft=0.2s,gap=200ms").goodput
    assert strict is not None
    assert (strict.requests, strict.missed) == (1, {"ttft": 1, "gap": 1})


def test_the_best_point_has_most_of_all_within() -> None:
    """More good requests a second count only while nearly all are good."""
    quick = figures(sample(0), sample(1), limits="ttft=200ms", duration_s=1.0)
    slow = figures(sample(0), sample(1), limits="ttft=200ms", duration_s=4.0)
    bad = figures(*[sample(0)] * 5, *[sample(1, first=0.5)] * 5, limits="ttft=200ms", duration_s=1.0)
    assert best_point([slow, quick, bad], 0.9) is quick
    assert best_point([bad], 0.9) is None


@pytest.mark.parametrize(
    ("own", "late", "held", "reason"),
    [
        (IDLE, 0.0, 0.0, ""),
        (OwnLag(0.95, 1.0, 2.0), 0.0, 0.0, "95% of its core"),
        (OwnLag(0.1, 30.0, 40.0), 0.0, 0.0, "event loop was up to 30 ms late"),
        (IDLE, 0.05, 0.0, "50 ms late"),
        # It was held on purpose.
        (IDLE, 0.05, 0.05, ""),
    ],
)
def test_a_generator_that_is_the_bottleneck_is_told(
    own: OwnLag, late: float, held: float, reason: str
) -> None:
    samples = [sample(at, sent=at + late, due=at, held=held, first=at + 0.1 + late) for at in range(5)]
    found = figures(*samples, pace=Pace(rate=1), own=own).generator
    assert reason in "; ".join(found.limits)
    assert bool(found.limits) == bool(reason)


def test_time_from_when_a_request_was_due_includes_what_it_waited() -> None:
    found = figures(sample(0, due=0.0, sent=0.4, held=0.4, first=0.5), pace=Pace(rate=1, at_once=1))
    assert found.ttft_ms is not None
    assert found.ttft_due_ms is not None
    assert (found.ttft_ms.mean, found.ttft_due_ms.mean) == pytest.approx((100, 500))


def workload(count: int, turns: int = 1) -> Workload:
    return Workload("w", [Conversation((Turn("a", 1, 1),) * turns) for _ in range(count)])


def answered(text: str = "x", failure: Failure | None = None) -> StreamedAnswer:
    answer = StreamedAnswer()
    answer.began_s = asyncio.get_running_loop().time()
    answer.came_s = array("d", [answer.began_s])
    answer.pieces = 1
    answer.usage = Usage(1, 1)
    answer.failure = failure
    answer._texts = [text]
    return answer


def test_times_that_requests_are_due() -> None:
    random = Random(1)
    assert due_times(workload(3), Pace(rate=2, constant=True), random) == [0, 0.5, 1.0]
    poisson = due_times(workload(4_000), Pace(rate=10), random)
    assert poisson[-1] == pytest.approx(400, rel=0.1)
    timed = Workload("t", [Conversation((), 0.0), Conversation((), 6.0)])
    assert due_times(timed, Pace(timed=True, speed=3), random) == [0, 2]


@pytest.mark.parametrize(
    ("pace", "most"), [(Pace(at_once=3), 3), (Pace(rate=1e9), 20), (Pace(rate=1e9, at_once=4), 4)]
)
async def test_no_more_than_allowed_are_in_flight(pace: Pace, most: int) -> None:
    flying, seen = 0, []

    async def post(turn: Turn, history: list[tuple[str, str]]) -> StreamedAnswer:
        nonlocal flying
        flying += 1
        seen.append(flying)
        await asyncio.sleep(0.002)
        flying -= 1
        return answered()

    run = await Generator(workload(20), pace, post).run(Random(0))
    assert (max(seen), len(run.samples)) == (most, 20)


async def test_turns_follow_one_another_with_the_answers_before() -> None:
    """A failure fails the turns that would follow."""
    seen: list[list[tuple[str, str]]] = []

    async def post(turn: Turn, history: list[tuple[str, str]]) -> StreamedAnswer:
        seen.append(list(history))
        return answered(f"answer {len(history)}", Failure("HTTP 500") if len(history) == 2 else None)

    run = await Generator(workload(1, turns=5), Pace(at_once=2), post).run(Random(0))
    assert seen[2] == [("a", "answer 0"), ("a", "answer 1")]
    assert [one.failure and one.failure.cause for one in run.samples] == [
        None,
        None,
        "HTTP 500",
        "earlier turn failed",
        "earlier turn failed",
    ]
    assert [one.asked_tokens for one in run.samples[:3]] == [1, 3, 5]
