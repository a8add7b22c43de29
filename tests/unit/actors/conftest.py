"""What tests of all actors use."""

import pytest

from tests.support.worlds.clock import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    """Time that stands still until a test moves it."""
    return ManualClock()
