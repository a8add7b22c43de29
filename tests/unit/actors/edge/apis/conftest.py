"""One edge for the tests of a module, unless it makes one of its own."""

from collections.abc import Iterator

import pytest

from tests.support.worlds.edge import EdgeWorld


@pytest.fixture(scope="module")
def edge() -> Iterator[EdgeWorld]:
    """One edge; tests use ids of their own."""
    with EdgeWorld() as world:
        yield world
