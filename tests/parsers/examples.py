"""How many examples a property has, and where its random numbers come from.

`PARSER_EXAMPLES` in the environment is the number for each format, 20 without it: a test run has the same ones every time. They come from
seeds, with which Hypothesis would take ten times as long; `python -m tests.parsers.search` finds the shortest text that breaks a property.
"""

import os
from collections.abc import Callable
from random import Random
from typing import Final

from tests.parsers.properties import PROPERTIES
from tests.parsers.writers import WRITERS
from tests.parsers.writers.writer import Writer

EXAMPLES: Final = int(os.environ.get("PARSER_EXAMPLES", "20"))

FEWEST: Final = 50
"""Examples of each property and family, unless fewer are asked for."""

FEWER: Final = 5
"""One in so many of the examples is for each property but the first: they read an answer several times."""

CALLS: Final = 2
"""Calls of an answer in the mean, where it may have three."""

SECONDS_PER_EXAMPLE: Final = 0.1
"""More than any takes, for time limits."""

TIMEOUT: Final = 120 + EXAMPLES * SECONDS_PER_EXAMPLE


def number_of_examples(claim: str, writer: Writer) -> int:
    """How many answers a family writes for a property. Families of one format share the number; answers of one call are twice as many."""
    families = sum(one.tool_format == writer.tool_format for one in WRITERS.values())
    calls = EXAMPLES * CALLS if claim == next(iter(PROPERTIES)) else EXAMPLES * CALLS // FEWER
    calls_each = (1 + writer.calls_max) / 2
    return max(round(calls / families / calls_each), min(EXAMPLES, FEWEST))


def source(claim: str, family: str, number: int) -> Random:
    """The random numbers of an example: others for each property and family."""
    return Random(f"{claim}, {family}, {number}")


def for_examples(check: Callable[[Random], None], claim: str, writer: Writer) -> None:
    """Check a property with as many examples as are asked for."""
    for number in range(number_of_examples(claim, writer)):
        try:
            check(source(claim, writer.name, number))
        except AssertionError as error:
            error.add_note(f"example {number}")
            raise
