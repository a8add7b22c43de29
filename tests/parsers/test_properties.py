"""Answers as each family writes them: whole, in pieces, and cut off."""

from random import Random

import pytest

from headwater.actors.edge.parsing.formats import TOOL_FORMATS
from headwater.actors.edge.parsing.selection import FORCED
from tests.parsers.examples import TIMEOUT, for_examples
from tests.parsers.properties import PROPERTIES
from tests.parsers.writers import WRITERS

pytestmark = pytest.mark.timeout(TIMEOUT)


def test_every_format_has_a_writer() -> None:
    assert {writer.tool_format for writer in WRITERS.values()} == set(TOOL_FORMATS) - set(FORCED)


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("claim", PROPERTIES)
def test_property(claim: str, name: str) -> None:
    def check(rnd: Random) -> None:
        fault = PROPERTIES[claim](WRITERS[name], rnd)
        assert fault is None, str(fault)

    for_examples(check, claim, WRITERS[name])
