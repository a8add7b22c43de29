"""The short forms of `tests.faults.kills.random_kills`."""

from pathlib import Path

import pytest

from tests.faults.kills.random_kills import Shape, random_kills

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

SECONDS = 9.0
ANSWER_S = 6.0


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(Shape(), id="4-workers"),
        pytest.param(Shape(edges=2, prefill=2, decode=2), id="2-prefill-2-decode", marks=pytest.mark.soak),
    ],
)
async def test_random_kills_cost_no_surviving_stream_a_token(
    tmp_path: Path, shape: Shape, request: pytest.FixtureRequest
) -> None:
    """Each process may be killed at any time: only answers of a killed edge end, and all others are whole."""
    seed = request.config.getoption("randomly_seed")
    report = await random_kills(
        tmp_path, seconds=SECONDS, seed=seed, shape=shape, answer_s=ANSWER_S, streams=4
    )
    report.check()
