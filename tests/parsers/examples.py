"""How many examples a property has, and where its random numbers come from.

`PARSER_EXAMPLES` in the environment is the number for each family, 50 without it: a test run has the same ones every time. Up to
`SHRUNK_MAX` come from Hypothesis, which makes a failing one small; more come from seeds, which take a tenth of the time.
"""

import os
from collections.abc import Callable
from random import Random
from typing import Final

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

EXAMPLES: Final = int(os.environ.get("PARSER_EXAMPLES", "50"))

SHRUNK_MAX: Final = 5_000

SECONDS_PER_EXAMPLE: Final = 0.1
"""More than any takes, for time limits."""

TIMEOUT: Final = 120 + EXAMPLES * SECONDS_PER_EXAMPLE


def for_examples(check: Callable[[Random], None]) -> None:
    """Check a property with as many examples as are asked for."""
    if EXAMPLES <= SHRUNK_MAX:
        _shrinking(check)
        return
    for seed in range(EXAMPLES):
        try:
            check(Random(seed))
        except AssertionError as error:
            error.add_note(f"with Random({seed})")
            raise


def _shrinking(check: Callable[[Random], None]) -> None:
    @settings(
        max_examples=EXAMPLES,
        derandomize=EXAMPLES <= 50,
        deadline=None,
        report_multiple_bugs=False,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(rnd=st.randoms(use_true_random=False))
    def holds(rnd: Random) -> None:
        check(rnd)

    holds()
