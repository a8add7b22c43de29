"""Each line of the mutation table is still there: a run of all of them takes too long to be part of `make test`."""

import pytest

from tests.mutation.mutation import Mutation
from tests.mutation.table import MUTATIONS
from tests.tidy.source import ROOT


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: one.why)
def test_the_line_to_mutate_occurs_once(mutation: Mutation) -> None:
    assert (ROOT / mutation.file).read_text().count(mutation.before) == 1, mutation.before
    missing = [path for path in mutation.tests if not (ROOT / path).exists()]
    assert not missing
