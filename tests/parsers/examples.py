"""How many examples a property has, and where its random numbers come from.

`PARSER_EXAMPLES` in the environment is the number for each family, 50 without it: a test run has the same ones every time. They come from
seeds, with which Hypothesis would take ten times as long; `python -m tests.parsers.search` finds the shortest text that breaks a property.
"""

import os
from collections.abc import Callable
from random import Random
from typing import Final

EXAMPLES: Final = int(os.environ.get("PARSER_EXAMPLES", "50"))

SECONDS_PER_EXAMPLE: Final = 0.1
"""More than any takes, for time limits."""

TIMEOUT: Final = 120 + EXAMPLES * SECONDS_PER_EXAMPLE


def for_examples(check: Callable[[Random], None]) -> None:
    """Check a property with as many examples as are asked for."""
    for seed in range(EXAMPLES):
        try:
            check(Random(seed))
        except AssertionError as error:
            error.add_note(f"with Random({seed})")
            raise
